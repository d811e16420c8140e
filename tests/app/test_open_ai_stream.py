"""Answers that come in pieces, and what is wrong with some."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from app.open_ai import ServerError
from app.open_ai_stream import AnswerReader, Chunk
from tests.app.hostile_server import chunk, usage


def body(*data: object) -> bytes:
    texts = (item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in data)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def read(received: bytes, content_type: str = "text/event-stream") -> list[Chunk]:
    reader = AnswerReader()
    chunks = list(reader.feed(received))
    reader.close(content_type)
    return chunks


def content(chunks: list[Chunk]) -> str:
    return "".join(choice.content for chunk in chunks for choice in chunk.choices or ())


@given(st.lists(st.text(), min_size=1), st.booleans(), st.data())
def test_text_comes_through_whatever_is_in_it(texts: list[str], chat: bool, data: st.DataObject) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    received = body(
        *(chunk(text, chat=chat) for text in texts), chunk(None, finish="stop", chat=chat), "[DONE]"
    )
    cut = data.draw(st.integers(0, len(received)))
    reader = AnswerReader()
    chunks = [*reader.feed(received[:cut]), *reader.feed(received[cut:])]
    reader.close()
    assert reader.done
    assert content(chunks) == "".join(texts)


def test_a_chunk_is_read_as_the_official_client_reads_it() -> None:
    """A chunk of OpenAI's documentation, with fields that are not known here."""
    text = (
        '{"id":"chatcmpl-123","object":"chat.completion.chunk","created":1694268190,"model":"gpt-4o-mini",'
        '"system_fingerprint":"fp_44709d6fcb","choices":[{"index":0,"delta":{"role":"assistant",'
        '"content":"Hi"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
        '"completion_tokens":7,"total_tokens":12,"completion_tokens_details":{"reasoning_tokens":0}}}'
    )
    [ours] = read(body(text))
    theirs = ChatCompletionChunk.model_validate_json(text)
    assert ours.choices is not None
    assert ours.usage is not None
    assert theirs.usage is not None
    assert ours.choices[0].content == theirs.choices[0].delta.content
    assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
    assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens


@pytest.mark.parametrize(
    ("choice", "has_tokens"),
    [
        ({"text": "a", "finish_reason": None}, True),
        ({"text": "a", "finish_reason": "length"}, True),
        ({"text": "", "finish_reason": None}, True),
        ({"text": "", "finish_reason": "length"}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"role": "assistant", "content": "a"}}, True),
        ({"delta": {"content": "a"}, "finish_reason": "stop"}, True),
        ({"delta": {}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"delta": {"role": "assistant", "content": None, "reasoning_content": "hm"}}, True),
    ],
)
def test_which_chunks_bring_tokens(choice: dict[str, object], has_tokens: bool) -> None:
    reader = AnswerReader()
    [read] = reader.feed(body({"choices": [choice]}))
    assert read.choices is not None
    assert read.choices[0].has_tokens == has_tokens


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"", r"no events \(text/event-stream\)"),
        (b'{"choices": []}', "no events"),
        (body(chunk("a")), "the stream ended before the answer did"),
        (body("[DONE]"), "the stream ended before the answer did"),
        (body(usage(3, 4)), "the stream ended before the answer did"),
        (body(chunk("a"), {"error": {"message": "it died"}}), "^it died$"),
        (body({"error": "it died"}), "^it died$"),
        (body({"error": {"message": "it\x1b died", "failure_id": "x"}}), r"^it\? died; failure record: x$"),
        (body({"error": {}}), "an error without a message"),
        (body({"error": 5}), "not OpenAI's protocol"),
        (body("nothing"), "not OpenAI's protocol"),
        (body(5), "not OpenAI's protocol"),
        (body([1]), "not OpenAI's protocol"),
        (body({"choices": 5}), "not OpenAI's protocol"),
        (body({"choices": [5]}), "not OpenAI's protocol"),
        (body({"choices": [{"delta": "x"}]}), "not OpenAI's protocol"),
        (body({"choices": [{"text": ["x"]}]}), "not OpenAI's protocol"),
        (body(usage("3", 4)), "not OpenAI's protocol"),
        (body(usage(-3, 4)), "not OpenAI's protocol"),
        (body("[" * 100_000), "not OpenAI's protocol"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "not OpenAI's protocol"),
        (b"data: " + b"x" * (17 << 20), "not OpenAI's protocol"),
    ],
)
def test_what_is_wrong_is_a_line(received: bytes, expected: str) -> None:
    with pytest.raises(ServerError, match=expected) as caught:
        read(received)
    assert str(caught.value).isprintable()


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "delta", "text", "content", "error", "usage", "finish_reason"]),
        inner,
        max_size=3,
    ),
).map(lambda value: body(value)))  # fmt: skip
def test_nothing_else_is_raised(received: bytes) -> None:
    with suppress(ServerError):
        read(received)


def test_what_came_before_an_error_is_kept() -> None:
    reader = AnswerReader()
    chunks = reader.feed(body(chunk("half"), {"error": {"message": "no"}}))
    assert content([next(chunks)]) == "half"
    with pytest.raises(ServerError):
        next(chunks)


def test_a_server_need_not_say_that_it_is_done_and_nothing_follows_that() -> None:
    assert content(read(body(chunk("a", finish="stop")))) == "a"
    assert content(read(body(chunk("a"), "[DONE]", chunk("b")))) == "a"
