"""Load on a real server, and on ones that misbehave."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from app.benchmark.load import Load, LoadSettings
from app.benchmark.workload import Prompt, arrival_times
from app.open_ai import first_model
from tests.app.hostile_server import chunk, events, hostile_server, response, stream, usage

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.app.local_server", str(checkpoint), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def load(url: str, prompts: list[Prompt] | None = None, **fields: Any) -> Load:
    """A load that has ended."""
    load = Load(LoadSettings(base_url=url, model="m", **fields), prompts or ["hello"] * 4)
    told: list[tuple[int, int]] = []
    anyio.run(load.run, lambda done, total: told.append((done, total)))
    count = len(load.outcomes)
    assert told == [(done, count) for done in range(1, count + 1)]
    return load


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_a_real_server(url: str, endpoint: str) -> None:
    prompts: list[Prompt] = [[60 + number] * 8 for number in range(6)]
    if "chat" in endpoint:
        prompts = ["some words"] * 6
    settings = LoadSettings(
        url, first_model(url, None), endpoint=endpoint, output_tokens=6, ignore_eos=True, max_concurrency=2
    )
    load = Load(settings, prompts)
    anyio.run(load.run, lambda done, total: None)
    assert [outcome.error for outcome in load.outcomes] == [None] * 6
    assert load.unfinished == 0
    for outcome in load.outcomes:
        assert outcome.output_tokens == 6
        assert "chat" in endpoint or outcome.prompt_tokens == 8
        times = outcome.token_times
        assert outcome.due <= outcome.begun <= times[0]
        assert times == sorted(times)
        assert times[-1] <= outcome.ended <= load.seconds
        assert len(times) <= 6


def test_what_waits_for_its_turn_is_told_from_when_it_was_due(url: str) -> None:
    settings = LoadSettings(url, first_model(url, None), output_tokens=8, max_concurrency=1)
    load = Load(settings, [[60, 61]] * 5)
    anyio.run(load.run, lambda done, total: None)
    ordered = sorted(load.outcomes, key=lambda outcome: outcome.begun)
    for before, after in itertools.pairwise(ordered):
        assert before.ended <= after.begun
        assert after.due == 0
        assert after.latency_from_arrival >= after.latency + before.latency


def test_requests_are_sent_whether_others_were_answered_or_not() -> None:
    """An open loop: 8 requests arrive at a server that has not answered one."""
    with hostile_server(b"", hang=60) as server:
        load_ = Load(LoadSettings(server.url, "m", rate=1000.0, timeout=60), ["a"] * 8)

        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(load_.run, lambda done, total: None)
                await anyio.to_thread.run_sync(server.wait_for, 8)
                tasks.cancel_scope.cancel()

        anyio.run(main)
    assert load_.unfinished == 8
    assert load_.outcomes == []


def test_no_request_is_sent_before_it_is_due() -> None:
    with hostile_server(events(chunk("a", chat=False, finish="stop"))) as server:
        ended = load(server.url, ["x"] * 8, rate=40.0, seed=2)
    outcomes = sorted(ended.outcomes, key=lambda outcome: outcome.due)
    assert [outcome.due for outcome in outcomes] == arrival_times(8, 40.0, 2)
    # The loop's clock is read before ours.
    assert all(outcome.begun > outcome.due - 1e-3 for outcome in outcomes)


def test_what_is_sent() -> None:
    answer = events(chunk("a", chat=False, finish="stop"), "[DONE]")
    with hostile_server(answer) as server:
        load(server.url, [[1, 2]], output_tokens=3, ignore_eos=True, temperature=0.5)
        load(server.url, ["hi"], endpoint="/api/chat/completions", output_tokens=3)
    assert [path for path, _ in server.requests] == ["/v1/completions", "/api/chat/completions"]
    completion, chat = (json.loads(body) for _, body in server.requests)
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert completion == {
        **common, "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "temperature": 0.5
    }  # fmt: skip
    assert chat == {
        **common,
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 3,
        "temperature": 0.0,
    }


def test_tokens_are_counted_by_usage_else_by_events() -> None:
    two = [chunk("a", chat=False), chunk("b", chat=False, finish="length")]
    with hostile_server(events(*two, usage(7, 9), "[DONE]")) as server:
        [outcome] = load(server.url, ["x"]).outcomes
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.has_usage) == (7, 9, True)
        assert len(outcome.token_times) == 2
    with hostile_server(events(*two)) as server:
        [outcome] = load(server.url, ["x"]).outcomes
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.has_usage) == (0, 2, False)
    # A special token alone: no text ever comes, but a token did.
    with hostile_server(events(chunk("", chat=False, finish="stop"), usage(7, 1), "[DONE]")) as server:
        [outcome] = load(server.url, ["x"]).outcomes
        assert outcome.ttft == outcome.latency


def test_an_answer_has_ended_with_its_last_event() -> None:
    """Whatever becomes of the connection after that: here it is kept, and then breaks off."""
    answer = events(chunk("a", chat=False, finish="stop"), "[DONE]", length=9999)
    for hang in (0, 60):
        with hostile_server(answer, hang=hang) as server:
            [outcome] = load(server.url, ["x"], timeout=30).outcomes
            assert outcome.error is None
            assert outcome.ended == outcome.token_times[-1]


async def test_connections_are_used_again() -> None:
    body = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    chunked = b"%x\r\n%b\r\n" % (len(body), body)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    connections = 0

    async def answer(stream: SocketStream) -> None:
        nonlocal connections
        connections += 1
        received = BufferedByteReceiveStream(stream)
        async with stream:
            with suppress(anyio.IncompleteRead):
                while True:
                    request = await received.receive_until(b"\r\n\r\n", 1 << 16)
                    length = request.lower().partition(b"content-length:")[2].split()[0]
                    await received.receive_exactly(int(length))
                    await stream.send(head + chunked)
                    # The end of the response comes by itself, after the last event.
                    await anyio.sleep(0.01)
                    await stream.send(b"0\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)
        load_ = Load(LoadSettings(f"http://127.0.0.1:{port}", "m", max_concurrency=2), ["x"] * 12)
        await load_.run(lambda done, total: None)
        tasks.cancel_scope.cancel()
    assert [outcome.error for outcome in load_.outcomes] == [None] * 12
    assert connections == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (response(b'{"error": {"message": "too many"}}', status="429 Too Many Requests"), "429: too many"),
        (response(b"oops", status="500 Internal Server Error"), "500: oops"),
        (response(b"x" * 10_000_000, status="500 Internal Server Error"), "500: xxx"),
        (response(b"", status="307 Temporary Redirect", head="Location: /v1/completions\r\n"), "307"),
        (response(b"no gzip", head="Content-Encoding: gzip\r\n"), "incorrect header check"),
        (response(b"{}"), "no events (application/json)"),
        (events(chunk("a", chat=False)), "the stream ended before the answer did"),
        (events(chunk("a", chat=False), length=9999), "peer closed connection"),
        (events(chunk("a", chat=False), {"error": {"message": "it died"}}, "[DONE]"), "it died"),
        (events([1]), "not OpenAI's protocol"),
        (events({"usage": 3}), "not OpenAI's protocol"),
        (stream(b"data: " + b"x" * (17 << 20)), "more than 16777216 bytes"),
        (b"HTTP/9.9 what\r\n\r\n", ""),
        (b"\x00\xff" * 50_000, ""),
        (b"", "disconnected"),
    ],
)
def test_what_a_server_does_wrong_is_counted(answer: bytes, expected: str) -> None:
    with hostile_server(answer) as server:
        outcomes = load(server.url).outcomes
    assert len(outcomes) == 4
    assert all(expected in str(outcome.error) and outcome.error for outcome in outcomes)
    assert all(str(outcome.error).isprintable() and len(str(outcome.error)) < 600 for outcome in outcomes)


def test_a_server_that_compresses_all_the_same_is_understood() -> None:
    packed = gzip.compress(b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
    answer = response(packed, kind="text/event-stream", head="Content-Encoding: gzip\r\n")
    with hostile_server(answer) as server:
        assert [outcome.error for outcome in load(server.url).outcomes] == [None] * 4


def test_a_server_that_hangs_is_given_up() -> None:
    for answer in (b"", events(chunk("a", chat=False))):
        with hostile_server(answer, hang=60) as server:
            outcomes = load(server.url, timeout=0.3).outcomes
        assert {outcome.error for outcome in outcomes} == {"no byte for 0.3 s"}


def test_nobody_there() -> None:
    assert all("connection" in str(outcome.error) for outcome in load("http://127.0.0.1:9").outcomes)
