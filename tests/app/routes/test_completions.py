"""``/v1/completions`` through the official client, against what transformers computed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from app.serving_engine import EngineState, QueueFullError
from engine.errors import EngineDeadError
from engine.messages import FinishReason
from engine.outputs import CompletionDelta
from tests.app.conftest import MODEL
from tests.app.local_engine import LocalEngine

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "extra_body": {"ignore_eos": True}}


def greedy_text(engine: LocalEngine, prompt: dict[str, Any]) -> str:
    stream = engine.inner.tokenizer.stream(prompt["token_ids"])
    return "".join(stream.push(token) for token in prompt["greedy32"][:-1]) + "".join(
        [stream.push(prompt["greedy32"][-1]), stream.finish()]
    )


async def test_token_ids_in_text_out_as_transformers_has_it(
    client: openai.AsyncOpenAI, engine: LocalEngine, reference: list[dict[str, Any]]
) -> None:
    prompts = [prompt["token_ids"] for prompt in reference]
    response = await client.completions.create(model=MODEL, prompt=prompts, **GREEDY)
    assert [choice.text for choice in response.choices] == [greedy_text(engine, p) for p in reference]
    assert [choice.index for choice in response.choices] == list(range(len(prompts)))
    assert {choice.finish_reason for choice in response.choices} == {"length"}
    assert response.object == "text_completion"
    assert response.model == MODEL
    assert response.id.startswith("cmpl-")
    assert response.usage is not None
    assert response.usage.prompt_tokens == sum(map(len, prompts))
    assert response.usage.completion_tokens == 32 * len(prompts)
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


async def test_text_is_cut_as_the_reference_cut_it(
    client: openai.AsyncOpenAI, engine: LocalEngine, reference: list[dict[str, Any]]
) -> None:
    for prompt in reference[:3]:  # the others are no text that anyone could write
        text = engine.inner.tokenizer.decode(prompt["token_ids"], skip_special_tokens=False)
        response = await client.completions.create(model=MODEL, prompt=text, **GREEDY)
        assert engine.requests[-1].prompt_token_ids == prompt["token_ids"]
        assert response.choices[0].text == greedy_text(engine, prompt)


async def test_a_stream_is_the_whole_in_pieces(
    client: openai.AsyncOpenAI, engine: LocalEngine, reference: list[dict[str, Any]]
) -> None:
    prompts = [prompt["token_ids"] for prompt in reference]
    texts = [""] * len(prompts)
    reasons: list[str | None] = [None] * len(prompts)
    usages = []
    stream = await client.completions.create(
        model=MODEL, prompt=prompts, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usages.append(chunk.usage)
    assert texts == [greedy_text(engine, prompt) for prompt in reference]
    assert reasons == ["length"] * len(prompts)
    assert len(chunks) > len(prompts) + 1
    assert chunks[-1].choices == []
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 32 * len(prompts)
    assert usages[:-1] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_stream_ends_with_done_and_has_no_usage_unless_asked(http: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    response = await http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in chunk for chunk in chunks)
    assert response.headers["x-request-id"] == chunks[0]["id"]


async def test_usage_in_every_chunk(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
    response = await http.post("/v1/completions", json=body)
    events = response.text.split("\n\n")[:-2]
    counts = [json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events]
    assert counts == [1, 2, 3, 4, 4]


async def test_n_completions_differ_and_a_seed_repeats_them(client: openai.AsyncOpenAI) -> None:
    async def ask() -> list[str]:
        response = await client.completions.create(
            model=MODEL, prompt=["one", "two"], n=3, seed=7, temperature=1.0, max_tokens=12
        )
        assert [choice.index for choice in response.choices] == list(range(6))
        return [choice.text for choice in response.choices]

    texts = await ask()
    assert len(set(texts)) == 6
    assert await ask() == texts


async def test_a_stop_string_ends_the_text_before_it(
    client: openai.AsyncOpenAI, engine: LocalEngine, reference: list[dict[str, Any]]
) -> None:
    whole = greedy_text(engine, reference[0])
    stop = whole[5:8]
    response = await client.completions.create(
        model=MODEL, prompt=reference[0]["token_ids"], stop=[stop, "never there"], **GREEDY
    )
    [choice] = response.choices
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_dump()["stop_reason"] == stop


async def test_a_stop_token_ends_it_and_is_named(
    client: openai.AsyncOpenAI, reference: list[dict[str, Any]]
) -> None:
    token = reference[0]["greedy32"][4]
    count = reference[0]["greedy32"].index(token) + 1
    response = await client.completions.create(
        model=MODEL,
        prompt=reference[0]["token_ids"],
        temperature=0,
        max_tokens=32,
        extra_body={"ignore_eos": True, "stop_token_ids": [token]},
    )
    [choice] = response.choices
    assert (choice.finish_reason, choice.model_dump()["stop_reason"]) == ("stop", token)
    assert response.usage is not None
    assert response.usage.completion_tokens == count


async def test_logit_bias_and_vllms_fields_reach_the_sampler(
    client: openai.AsyncOpenAI, engine: LocalEngine
) -> None:
    response = await client.completions.create(
        model=MODEL,
        prompt="hello",
        temperature=0,
        max_tokens=5,
        logit_bias={"42": 100},
        presence_penalty=0.5,
        frequency_penalty=0.25,
        top_p=0.9,
        extra_body={
            "return_token_ids": True,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        },
    )
    assert response.choices[0].model_dump()["token_ids"] == [42] * 5
    params = engine.requests[-1].params
    assert params.logit_bias == {42: 100.0}
    assert (params.presence_penalty, params.frequency_penalty, params.top_p) == (0.5, 0.25, 0.9)
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.1, 2)
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


async def test_logprobs_are_those_of_the_chosen_and_the_likeliest(
    client: openai.AsyncOpenAI, reference: list[dict[str, Any]]
) -> None:
    response = await client.completions.create(
        model=MODEL, prompt=reference[0]["token_ids"], logprobs=3, **GREEDY
    )
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == 32
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        # Greedy: the chosen is the likeliest. Two tokens may have the same text, so there may be fewer.
        assert logprob == pytest.approx(max(top.values()))
        assert token in top
        assert len(top) <= 3
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:place]) for place in range(32)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs_scores_the_prompt(
    http: httpx.AsyncClient, reference: list[dict[str, Any]], stream: bool, n: int
) -> None:
    prompt = {**reference[1], "text": "The devil"}
    body = {
        **{"prompt": prompt["text"], "echo": True, "logprobs": 1, "n": n, "seed": 1},
        **{"max_tokens": 2, "ignore_eos": True, "stream": stream},
    }
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    choices: dict[int, dict[str, Any]] = {}
    if stream:
        for event in response.text.split("\n\n")[:-2]:
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                merged = choices.setdefault(
                    choice["index"], {"text": "", "tokens": [], "token_logprobs": [], "text_offset": []}
                )
                merged["text"] += choice["text"]
                for name in ("tokens", "token_logprobs", "text_offset"):
                    merged[name] += choice["logprobs"][name]
    else:
        for choice in response.json()["choices"]:
            choices[choice["index"]] = {"text": choice["text"], **choice["logprobs"]}
    assert len(choices) == n
    count = len(prompt["token_ids"])
    for choice in choices.values():
        assert choice["text"].startswith(prompt["text"])
        assert len(choice["tokens"]) == len(choice["text_offset"]) == count + 2
        assert choice["token_logprobs"][0] is None
        assert all(logprob < 0 for logprob in choice["token_logprobs"][1:])
        assert choice["text_offset"] == sorted(choice["text_offset"])


async def test_nothing_but_the_prompt_scored(
    client: openai.AsyncOpenAI, engine: LocalEngine, reference: list[dict[str, Any]]
) -> None:
    prompt = reference[2]
    response = await client.completions.create(
        model=MODEL, prompt=prompt["token_ids"], echo=True, max_tokens=0, logprobs=0
    )
    [choice] = response.choices
    assert choice.text == engine.inner.tokenizer.decode(prompt["token_ids"], skip_special_tokens=False)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(prompt["token_ids"])
    assert response.usage is not None
    assert response.usage.completion_tokens == 0


async def test_max_tokens_null_fills_the_models_length(
    client: openai.AsyncOpenAI, engine: LocalEngine
) -> None:
    response = await client.completions.create(
        model=MODEL, prompt=[5] * 500, max_tokens=None, temperature=0, extra_body={"ignore_eos": True}
    )
    assert response.usage is not None
    assert response.usage.total_tokens == 512


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": [1] * 512}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": [2**40]}, 400, "prompt"),
        ({"prompt": [True]}, 422, "prompt"),
        ({"prompt": []}, 422, "prompt"),
        ({"prompt": None}, 422, "prompt"),
        ({"prompt": [["a"]]}, 422, "prompt"),
        ({"model": "gpt-4o"}, 404, "model"),
        ({"model": 3}, 422, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 422, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"min_p": 2}, 400, "min_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 422, "max_tokens"),
        ({"max_tokens": 10**30}, 422, "max_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
        ({"n": 0}, 400, "n"),
        ({"n": 10**6}, 400, "n"),
        ({"best_of": 4}, 400, "best_of"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"presence_penalty": 3}, 400, "presence_penalty"),
        ({"frequency_penalty": -3}, 400, "frequency_penalty"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
        ({"logit_bias": [1]}, 422, "logit_bias"),
        ({"logprobs": 99}, 400, "logprobs"),
        ({"logprobs": True}, 422, "logprobs"),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": 5}, 422, "stop"),
        ({"stop": ["a", None]}, 422, "stop[1]"),
        ({"stop_token_ids": [-1]}, 422, "stop_token_ids[0]"),
        ({"stop_token_ids": [99999]}, 400, "stop_token_ids"),
        ({"priority": 1}, 400, "priority"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, 422, "stream_options.usage"),
        ({"max_token": 5}, 422, "max_token"),
    ],
)
async def test_a_bad_field_is_named(
    http: httpx.AsyncClient, engine: LocalEngine, fields: dict[str, Any], status: int, param: str
) -> None:
    response = await http.post("/v1/completions", json={"prompt": "hello", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert param in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert engine.requests == []


async def test_the_errors_are_the_official_clients(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-4o", prompt="hello")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[1] * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError):
        await client.completions.create(model=MODEL, prompt="hello", extra_body={"seed": "x"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(
    http: httpx.AsyncClient, engine: LocalEngine, stream: bool
) -> None:
    engine.refusal = QueueFullError("64 requests wait (--max-queued-requests)", retry_after=7)
    for prompt in ("hello", ["one", "two"]):
        response = await http.post("/v1/completions", json={"prompt": prompt, "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "7"
        assert "--max-queued-requests" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_503_with_the_failure_id_and_no_path(
    http: httpx.AsyncClient, engine: LocalEngine, stream: bool
) -> None:
    engine.refusal = EngineDeadError(
        "the engine stopped; failure record: /home/someone/failures/F1.json", failure_id="F1"
    )
    response = await http.post("/v1/completions", json={"prompt": "hello", "stream": stream})
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["failure_id"] == "F1"
    assert "F1" in error["message"]
    assert "/home" not in response.text


def piece(text: str, *, index: int = 0, reason: FinishReason | None = None, **more: Any) -> CompletionDelta:
    return CompletionDelta("r", index, text, [1], finish_reason=reason, **more)


async def test_a_failure_in_mid_stream_is_an_event_that_names_the_record(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, engine: LocalEngine
) -> None:
    what = "request r: the engine died at /opt/vtserve/engine/core.py:12"
    engine.script = [
        piece("some "),
        piece("", reason=FinishReason.ERROR, error=what, failure_id="F2"),
    ]
    stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
    assert (await anext(stream)).choices[0].text == "some "
    with pytest.raises(openai.APIError, match="F2"):
        await anext(stream)
    response = await http.post("/v1/completions", json={"prompt": "hello", "stream": True})
    assert "/opt" not in response.text
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_failure_is_503_when_nothing_was_sent(
    client: openai.AsyncOpenAI, engine: LocalEngine
) -> None:
    engine.script = [
        piece("some "),
        piece("", reason=FinishReason.ERROR, error="it died", failure_id="F3"),
    ]
    with pytest.raises(openai.InternalServerError, match="F3") as caught:
        await client.completions.create(model=MODEL, prompt="hello")
    assert caught.value.status_code == 503


async def test_before_the_engine_was_ever_ready_it_is_503(
    client: openai.AsyncOpenAI, engine: LocalEngine
) -> None:
    engine.state, engine.tokenizer, engine.limits = EngineState.STARTING, None, None
    with pytest.raises(openai.InternalServerError, match="starting") as caught:
        await client.completions.create(model=MODEL, prompt="hello")
    assert caught.value.response.headers["retry-after"]


async def test_a_fault_of_ours_is_500_and_tells_nothing(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    engine.refusal = ZeroDivisionError("/secret/path")
    response = await http.post("/v1/completions", json={"prompt": "hello"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
