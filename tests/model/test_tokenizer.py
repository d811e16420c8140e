"""Tokens and text: against what the tokenizers library decodes as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.errors import CheckpointError, RequestError
from engine.model.chat_template import ChatTemplate
from engine.model.text_stream import TextStream
from engine.model.tokenizer import Tokenizer

CHARACTERS = "Hello wörld 日本語 😀 👩‍👩‍👧 naïve 🇩🇪 \ufffd \x00 \u200d"


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's: all 256 bytes, some merges (one ends within a character), and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}

    def spelled(data: bytes) -> list[str]:
        return [BYTE_CHARACTERS[byte] for byte in data]

    merges = []
    for data in (b"he", b" w", "é".encode(), "日".encode()[:2], "日".encode(), b"\x80\xf0", b"\x9f\x98"):
        left, right = "".join(spelled(data[:-1])), spelled(data[-1:])[0]
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("é😀", normalized=False)])
    return inner


def _byte_characters() -> dict[int, str]:
    """GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the rest for U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's: pieces with ▁ for a space, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁a", "a", "b", "é", "日", "▁Hello", "lo", "\n", "\ufffd"]
    inner = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def made(inner: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(inner, ChatTemplate({}, {}))


def streamed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


def check_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """All of it is the whole text, and no piece holds U+FFFD that the whole has not."""
    pieces = streamed(tokenizer.stream([], skip_special_tokens=skip), ids)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    given_out = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        given_out += piece
        assert whole.startswith(given_out)
        # Nothing but one unfinished character is held back, and no character that is complete.
        text = tokenizer.decode(ids[:count], skip_special_tokens=skip)
        assert given_out in (text, text.removesuffix("\ufffd"))


ids_of_bytes = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=60)


@settings(deadline=None, max_examples=400)
@given(ids=ids_of_bytes, skip=st.booleans())
@example(ids=BYTE_LEVEL.encode(CHARACTERS).ids, skip=True)
@example(ids=[BYTE_LEVEL.token_to_id(BYTE_CHARACTERS[0x80])] * 50, skip=True)
@example(ids=[BYTE_LEVEL.token_to_id(BYTE_CHARACTERS[0xF0])] * 50, skip=True)
@example(ids=BYTE_LEVEL.encode("é").ids + [BYTE_LEVEL.token_to_id("<s>")] * 40 + [3], skip=True)
def test_any_tokens_of_a_byte_level_vocabulary(ids: list[int], skip: bool) -> None:
    check_stream(made(BYTE_LEVEL), ids, skip)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=80), skip=st.booleans())
@example(text=CHARACTERS, skip=False)
@example(text="<s>é</s>" * 9 + "é😀<tool>", skip=True)
def test_any_text_in_a_byte_level_vocabulary(text: str, skip: bool) -> None:
    tokenizer = made(BYTE_LEVEL)
    ids = tokenizer.encode(text)
    check_stream(tokenizer, ids, skip)


data_in_bytes = st.lists(
    st.one_of(
        st.text(max_size=6).map(lambda text: [3 + byte for byte in text.encode()]),
        st.lists(st.integers(259, 268), max_size=4),
        st.just([1]),
    ),
    max_size=20,
).map(lambda parts: [token_id for part in parts for token_id in part])


@settings(deadline=None, max_examples=300)
@given(ids=data_in_bytes, skip=st.booleans())
@example(ids=[3 + byte for byte in "日本😀".encode()] + [266, 266], skip=True)
@example(ids=[259, 260, 266], skip=True)
@example(ids=[3 + 0x20, 262], skip=True)
@example(ids=[3 + 0x20, 3 + 0x20, 259], skip=True)
def test_characters_that_fall_back_to_bytes(ids: list[int], skip: bool) -> None:
    check_fallback(ids, skip)


def check_fallback(ids: list[int], skip: bool) -> None:
    tokenizer = made(BYTE_FALLBACK)
    pieces = streamed(tokenizer.stream([], skip_special_tokens=skip), ids)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces) or 269 in ids or "\ufffd" in whole


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=30))
@example(data="é".encode() + b"\xff")
@example(data=b"\xf0\x9f\x98")
@example(data=b"\xe2\x82\xf0\x9f\x98\x80\x80")
def test_bytes_that_are_no_characters_are_replaced_one_by_one(data: bytes) -> None:
    """Where the library gives up a whole run of bytes, its characters stay."""
    tokenizer = made(BYTE_FALLBACK)
    a = BYTE_FALLBACK.token_to_id("a")
    ids = [a, *(3 + byte for byte in data)]
    found = "".join(streamed(tokenizer.stream([]), ids))
    assert found == "a" + replaced_bytes(data)
    if found != tokenizer.decode(ids):
        assert tokenizer.decode(ids) == "a" + "\ufffd" * len(data)


def replaced_bytes(data: bytes) -> str:
    """Every byte that is no part of a character as one U+FFFD."""
    text, rest = "", data
    while rest:
        for size in (1, 2, 3, 4):
            try:
                text += rest[:size].decode()
            except UnicodeDecodeError:
                continue
            rest = rest[size:]
            break
        else:
            text, rest = text + "\ufffd", rest[1:]
    return text


@pytest.mark.parametrize("inner", [BYTE_LEVEL, BYTE_FALLBACK])
@settings(deadline=None, max_examples=150)
@given(text=st.text("aéb日😀 \n", max_size=40), cut=st.integers(0, 60))
def test_a_prompt_is_not_repeated(inner: tokenizers.Tokenizer, text: str, cut: int) -> None:
    """What the prompt said and the stream's text are the text, cut within a character or not."""
    tokenizer = made(inner)
    ids = tokenizer.encode(text)
    assume(cut <= len(ids))
    pieces = streamed(tokenizer.stream(ids[:cut]), ids[cut:])
    prompt = tokenizer.decode(ids[:cut]).removesuffix("\ufffd")
    if inner is BYTE_FALLBACK:  # the library gives up all of an unfinished character's run of bytes
        prompts = (tokenizer.decode(ids[: cut - held]) for held in range(cut + 1))
        prompt = next(prompt for prompt in prompts if "\ufffd" not in prompt)
    assert prompt + "".join(pieces) == tokenizer.decode(ids)


def test_a_prompts_own_replacement_characters_stay_its_own() -> None:
    for inner in (BYTE_LEVEL, BYTE_FALLBACK):
        tokenizer = made(inner)
        prompt, rest = tokenizer.encode("é\ufffd"), tokenizer.encode("ab")
        assert "".join(streamed(tokenizer.stream(prompt), rest)) == "ab"
        # Half a character that is never completed is no output.
        half = tokenizer.encode("😀")[:2]
        assert "".join(streamed(tokenizer.stream(half), [])) == ""
        assert "".join(streamed(tokenizer.stream(half), rest)) == "ab"


class CountingDecode:
    """The library's decode, and how many tokens it was ever given."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.calls = 0
        self.largest = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.calls += 1
        self.largest = max(self.largest, len(ids))
        return str(self._inner.decode(list(ids)))


@pytest.mark.parametrize(
    ("inner", "byte_values"),
    [(BYTE_LEVEL, {}), (BYTE_FALLBACK, {3 + byte: byte for byte in range(256)})],
)
@pytest.mark.parametrize("pattern", [b"\x80", b"\xf0", b"\xf0\x9f", b"\xe6\x97\xa5", b"a", b"\x00\xff"])
def test_a_token_costs_the_same_at_any_length(
    inner: tokenizers.Tokenizer, byte_values: dict[int, int], pattern: bytes
) -> None:
    decode = CountingDecode(inner)
    of_byte = {value: key for key, value in byte_values.items()} or {
        byte: inner.token_to_id(character) for byte, character in BYTE_CHARACTERS.items()
    }
    ids = [of_byte[byte] for byte in pattern] * 500
    stream = TextStream(decode, ids, has_text=lambda token_id: True, byte_values=byte_values)
    text = "".join(stream.push(token_id) for token_id in ids)
    assert decode.calls <= 3 * len(ids) + 1
    assert decode.largest <= 17
    assert len(text) >= 480, "invalid bytes are given out while they come"


def test_the_librarys_own_stream_holds_back_without_bound() -> None:
    """Why it is not used. Where all is well, the two agree."""
    tokenizer, theirs = made(BYTE_LEVEL), decoders.DecodeStream(skip_special_tokens=True)
    ids = tokenizer.encode("Hello wörld 日本語 😀")
    ours = tokenizer.stream([])
    assert [ours.push(i) for i in ids] == [theirs.step(BYTE_LEVEL, i) or "" for i in ids]
    invalid = BYTE_LEVEL.token_to_id(BYTE_CHARACTERS[0x80])
    assert not any(theirs.step(BYTE_LEVEL, invalid) for _ in range(100))
    assert "".join(ours.push(invalid) for _ in range(100)) == "\ufffd" * 99


# -- tokenizers that others made ---------------------------------------------------------------------------


@pytest.fixture(scope="session", params=["llama-untied/NVFP4-FP8KV-ct", "qwen2/NVFP4-modelopt"])
def stored(request: pytest.FixtureRequest, shared_checkpoints: Path) -> Path:
    return shared_checkpoints / request.param


def test_stored_tokenizers(stored: Path) -> None:
    tokenizer = Tokenizer.open(stored)
    size = tokenizers.Tokenizer.from_file(str(stored / "tokenizer.json")).get_vocab_size()

    @settings(deadline=None, max_examples=200)
    @given(ids=st.lists(st.integers(0, size + 1), max_size=60), skip=st.booleans())
    def any_tokens(ids: list[int], skip: bool) -> None:
        check_stream(tokenizer, ids, skip)

    @settings(deadline=None, max_examples=100)
    @given(text=st.text(max_size=60))
    @example(text=CHARACTERS + "<|bos|>x<|eos|>")
    def any_text(text: str) -> None:
        for skip in (False, True):
            check_stream(tokenizer, tokenizer.encode(text), skip)

    any_tokens()
    any_text()


def test_the_demo_models_tokenizer_if_it_is_here() -> None:
    from app.demo_model import DEMO, cache_directory

    found = sorted(cache_directory(os.environ).glob(f"{DEMO.name}*/tokenizer.json"))
    if not found:
        pytest.skip("the demo model is not in the cache: `make generate` fetches it")
    tokenizer = Tokenizer.open(found[0].parent)

    @settings(deadline=None, max_examples=100)
    @given(ids=st.lists(st.integers(0, 49_151), max_size=60), skip=st.booleans())
    def any_tokens(ids: list[int], skip: bool) -> None:
        check_stream(tokenizer, ids, skip)

    any_tokens()
    check_stream(tokenizer, tokenizer.encode(CHARACTERS * 5), True)


def test_a_chat_template_is_read_with_its_special_tokens(stored: Path) -> None:
    messages = [{"role": "user", "content": "hé"}]
    tokenizer = Tokenizer.open(stored)
    text = tokenizer.apply_chat_template(messages)
    assert text == "<|bos|>user\nhé<|eos|>\n<|bos|>assistant\n"
    assert tokenizer.encode(text)[0] == 509


def write(directory: Path, inner: tokenizers.Tokenizer, **files: Any) -> Path:
    inner.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=32, pad_token="<s>")
    stored = json.loads((write(tmp_path, inner) / "tokenizer.json").read_text())
    assert stored["truncation"] is not None
    assert stored["padding"] is not None
    assert Tokenizer.open(tmp_path).encode("a" * 8) == byte_level().encode("a" * 8).ids
    assert len(Tokenizer.open(tmp_path).encode("a")) == 1


def test_special_tokens_come_of_either_file(tmp_path: Path) -> None:
    settings_file = {
        "bos_token": {"content": "<s>", "special": True},
        "add_bos_token": True,
        "pad_token": None,
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ add_bos_token }}",
    }
    legacy = {"bos_token": "<other>", "eos_token": "</s>"}
    write(tmp_path, byte_level(), tokenizer_config=settings_file, special_tokens_map=legacy)
    assert Tokenizer.open(tmp_path).apply_chat_template([]) == "<s></s>"


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(RequestError, match=r"^prompt: .*half a surrogate pair at character 2"):
        made(BYTE_LEVEL).encode("ab\ud83d")


def test_what_the_library_cannot_encode_fails_one_request(tmp_path: Path) -> None:
    """It raises plain exceptions, and where it gives up, one that `except Exception` lets pass."""
    lacking = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<none>"))
    directory = write(tmp_path, lacking)
    assert Tokenizer.open(directory).encode("a") == [0]
    with pytest.raises(
        RequestError, match=r"^prompt: the model's tokenizer cannot encode it: WordLevel error"
    ):
        Tokenizer.open(directory).encode("b")

    settings_file = json.loads((write(tmp_path, byte_level()) / "tokenizer.json").read_text())
    settings_file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<gone>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings_file))
    with pytest.raises(RequestError, match=r"^prompt: the model's tokenizer cannot encode it: ") as caught:
        Tokenizer.open(tmp_path).encode("a")
    assert "\n" not in str(caught.value)


def spoil_json(directory: Path) -> str:
    (directory / "tokenizer.json").write_text('{"model":\n')
    return "tokenizer.json: not a tokenizer"


def spoil_bytes(directory: Path) -> str:
    (directory / "tokenizer.json").write_bytes(b"\xff\x00")
    return "tokenizer.json: not a tokenizer"


def lose(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json: no such file"


def spoil_settings(directory: Path) -> str:
    (directory / "tokenizer_config.json").write_text("[]")
    return "tokenizer_config.json: expected a JSON object"


@pytest.mark.parametrize("spoil", [spoil_json, spoil_bytes, lose, spoil_settings])
def test_what_is_no_tokenizer_is_said_in_one_line(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    expected = spoil(write(tmp_path, byte_level()))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
