"""Tokenizers rebuilt from GGUF metadata, against tokenizers made by hand and the real model's ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.errors import CheckpointError, UnsupportedModelError
from engine.quantizer.gguf_tokenizer import rebuild_tokenizer
from tests.quantizer.gguf_files import SPECIAL, vocabulary

PATH = Path("model.gguf")


def fields(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    tokens, merges = vocabulary()
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def tokens_of(text: str, pre: str = "smollm", **changes: Any) -> list[str]:
    return rebuild_tokenizer(fields(pre, **changes), PATH, 512).tokenizer.encode(text).tokens


def test_merges_and_special_tokens() -> None:
    assert tokens_of("<|im_start|>the cat the<|im_end|>") == [
        "<|im_start|>", "t", "he", "Ġcat", "Ġthe", "<|im_end|>"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "1", "2"]),  # every digit alone
        ("gpt-2", ["12", "12"]),
        ("llama-bpe", ["12", "1", "2"]),  # three digits together, then the rest
        ("qwen2", ["1", "2", "1", "2"]),
    ],
)
def test_the_rule_decides_how_digits_are_split(pre: str, expected: list[str]) -> None:
    assert tokens_of("1212", pre, add_bos_token=False) == expected


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_any_text_comes_back(pre: str) -> None:
    tokenizer = rebuild_tokenizer(fields(pre), PATH, 512).tokenizer
    for text in ["the cat's 12 cats", "Le café — 今日は 🙂\n\n\ttab  two", "\x00\x7f", ""]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_beginning_of_sequence_where_the_metadata_says_so() -> None:
    assert tokens_of("a") == ["a"]
    assert tokens_of("a", add_bos_token=True) == ["<|im_start|>", "a"]
    assert tokens_of("a", "llama-bpe") == ["<|im_start|>", "a"], "llama.cpp's default for this rule"


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tokens, _ = vocabulary()
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    named = ["<tool>", *tokens]
    tokenizer = rebuild_tokenizer(fields(tokens=named, token_type=[4, *types]), PATH, 512).tokenizer
    encoded = tokenizer.encode("a<tool>b<|im_end|>")
    assert encoded.tokens == ["a", "<tool>", "b", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "a<tool>b"


def test_files_are_what_the_tokenizers_library_reads(tmp_path: Path) -> None:
    made = rebuild_tokenizer(fields(padding_token_id=0) | {"tokenizer.chat_template": "{{ 1 }}"}, PATH, 512)
    made.write(tmp_path)
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert read.encode("<|im_start|> the12").ids == made.tokenizer.encode("<|im_start|> the12").ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        SPECIAL[1],
        SPECIAL[2],
        SPECIAL[0],
    )
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ 1 }}"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "llama"}, UnsupportedModelError, "tokenizer 'llama' is not served"),
        ({"pre": "somebody-elses"}, UnsupportedModelError, "tokenizer.ggml.pre 'somebody-elses'"),
        ({"merges": None}, CheckpointError, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b c"]}, CheckpointError, "not two tokens"),
        ({"merges": ["a nothing"]}, CheckpointError, "contradict each other"),
        ({"token_type": [1]}, CheckpointError, "has 1 entries for"),
        ({"eos_token_id": 99_999}, CheckpointError, "eos_token_id is 99999"),
    ],
)
def test_metadata_that_cannot_be_used(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        rebuild_tokenizer(fields(**{"pre": "smollm"} | changes), PATH, 512)
    assert "\n" not in str(caught.value)
