"""``/v1/chat/completions`` through the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.app.conftest import MODEL
from tests.app.local_engine import LocalEngine

HELLO: Any = [{"role": "user", "content": "hello"}]
IGNORE: dict[str, Any] = {"ignore_eos": True}


async def test_the_template_makes_the_prompt(client: openai.AsyncOpenAI, engine: LocalEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    response = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    prompt = engine.inner.tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|>system\nBe brief.<|eos|>\n<|bos|>user\none\ntwo<|eos|>\n<|bos|>assistant\n"
    assert response.id.startswith("chatcmpl-")
    assert response.object == "chat.completion"
    assert response.choices[0].message.role == "assistant"
    assert response.usage is not None
    assert response.usage.prompt_tokens == len(engine.requests[0].prompt_token_ids)


async def test_a_stream_is_the_whole_in_pieces(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "temperature": 0,
        "n": 2,
        "extra_body": IGNORE,
    }
    whole = await client.chat.completions.create(max_tokens=12, **asked)
    stream = await client.chat.completions.create(
        max_completion_tokens=12, stream=True, stream_options={"include_usage": True}, **asked
    )
    chunks = [chunk async for chunk in stream]
    texts, reasons, first = ["", ""], [None, None], [None, None]
    for chunk in chunks:
        for choice in chunk.choices:
            first[choice.index] = first[choice.index] or choice.delta.role  # type: ignore[call-overload]
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason  # type: ignore[call-overload]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert first == ["assistant", "assistant"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_the_streaming_helper_of_the_client_understands_it(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL, messages=HELLO, logit_bias={"64": 100}, stop="aaaa", temperature=0, extra_body=IGNORE
    ) as stream:
        completion = await stream.get_final_completion()
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].message.role == "assistant"


async def test_without_a_limit_the_models_length_is_filled(client: openai.AsyncOpenAI) -> None:
    long: Any = [{"role": "user", "content": "x" * 440}]
    response = await client.chat.completions.create(
        model=MODEL, messages=long, temperature=0, extra_body=IGNORE
    )
    assert response.usage is not None
    assert response.usage.total_tokens == 512


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        **{"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 6},
        **{"logprobs": True, "top_logprobs": 2, "extra_body": IGNORE},
    }
    if stream:
        chunks = await client.chat.completions.create(stream=True, **asked)
        lists = [c.choices[0].logprobs async for c in chunks]
        entries = [entry for item in lists if item is not None for entry in item.content or ()]
    else:
        response = await client.chat.completions.create(**asked)
        assert response.choices[0].logprobs is not None
        entries = response.choices[0].logprobs.content or []
    assert len(entries) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        # Greedy: the likeliest is the one chosen.
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, rel=1e-6)  # one is float32
        assert entry.top_logprobs[0].logprob > entry.top_logprobs[1].logprob
        assert bytes(entry.bytes or ()).decode() == entry.token


async def test_vllms_fields_of_prompts(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    body = {
        **{"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True},
        **{"return_tokens_as_token_ids": True, "logprobs": True},
    }
    response = (await http.post("/v1/chat/completions", json=body)).json()
    prompt = engine.requests[0].prompt_token_ids
    assert response["prompt_token_ids"] == prompt
    assert response["prompt_logprobs"][0] is None
    for token, entries in zip(prompt[1:], response["prompt_logprobs"][1:], strict=True):
        assert str(token) in entries
        assert min(entry["rank"] for entry in entries.values()) == 1
    [token] = response["choices"][0]["token_ids"]
    assert response["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{token}"


async def test_an_echo_repeats_what_the_assistant_began(http: httpx.AsyncClient) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I say"}]
    body = {"messages": messages, "echo": True, "max_tokens": 2, "add_generation_prompt": False}
    response = (await http.post("/v1/chat/completions", json=body)).json()
    assert response["choices"][0]["message"]["content"].startswith("I say")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 422, "messages"),
        ({"messages": "hello"}, 422, "messages"),
        ({"messages": [{"content": "x"}]}, 422, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 422, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"logprobs": 2}, 422, "logprobs"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"continue_final_message": True}, 400, "continue_final_message"),
        ({"n": 5000}, 400, "n"),
        ({"model": "nobody"}, 404, "model"),
        ({"audio": {}}, 422, "audio"),
    ],
)
async def test_a_bad_field_is_named(
    http: httpx.AsyncClient, engine: LocalEngine, fields: dict[str, Any], status: int, param: str
) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert param in error["message"]
    assert engine.requests == []


async def test_what_changes_nothing_is_accepted(http: httpx.AsyncClient) -> None:
    body = {
        **{"messages": HELLO, "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, "store": False},
        **{"service_tier": "auto", "parallel_tool_calls": True, "tools": [], "tool_choice": "none"},
        **{"response_format": {"type": "text"}, "stop": None, "temperature": None, "n": None},
    }
    response = await http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
    assert response.status_code == 200, response.text


JSON = {"Content-Type": "application/json"}
