"""The engine in its own process: what is left of requests, records and processes when it dies."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from app.engine_client import ClientSettings, EngineClient
from app.engine_process import EngineCommand
from app.serving_engine import EngineState, QueueFullError
from engine.config import EngineConfig
from engine.errors import EngineDeadError, RequestError
from engine.memory.settings import TraceSettings
from engine.messages import AddRequest, FinishReason
from engine.model.tokenizer import Tokenizer
from engine.outputs import CompletionDelta
from engine.sampling_params import SamplingParams
from tests import faulty_engine

FAULTY = EngineCommand([sys.executable, "-P", "-m", "tests.faulty_engine"])
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}


@dataclass
class Ended:
    """What became of a request."""

    tokens: list[int]
    delta: CompletionDelta


@dataclass
class Handle:
    """A client under test."""

    client: EngineClient
    said: io.StringIO
    _count: int = 0

    async def reach(self, state: EngineState, *, generation: int = 1) -> None:
        with anyio.fail_after(60):
            while self.client.state is not state or self.client.generation < generation:
                await anyio.sleep(0.005)

    def request(self, prompt: list[int], **params: Any) -> AddRequest:
        self._count += 1
        return AddRequest(
            request_id=f"r{self._count}",
            prompt_token_ids=prompt,
            params=SamplingParams(**{**GREEDY, **params}),
        )

    async def run(self, prompt: list[int], **params: Any) -> Ended:
        tokens: list[int] = []
        last = None
        async for delta in self.client.generate(self.request(prompt, **params), None):
            tokens += delta.token_ids
            last = delta
        assert last is not None
        return Ended(tokens, last)

    def record(self, failure_id: str | None = None) -> dict[str, Any]:
        chosen = failure_id or self.client.failures.list()[0]["id"]
        data = self.client.failures.get(chosen)
        assert data is not None
        record: dict[str, Any] = json.loads(data)
        on_disk = json.loads(Path(record["path"]).read_text())
        assert {**on_disk, "path": None} == {**record, "path": None}
        return record


Start = Callable[..., Any]


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Start:
    @asynccontextmanager
    async def begin(
        *, config: dict[str, Any] | None = None, trace: bool = True, **settings: Any
    ) -> AsyncGenerator[Handle, None]:
        engine = EngineConfig(
            **{
                "model": str(checkpoint),
                "device": "cpu",
                "kv_cache_memory": 16 << 20,
                "threads": 1,
                "max_model_len": 512,
                "max_num_seqs": 4,
                "failure_dir": str(tmp_path / "failures"),
                **(config or {}),
            }
        )
        said = io.StringIO()
        client = EngineClient(
            engine,
            TraceSettings(trace=trace, stats=True, records=256),
            Tokenizer.open(checkpoint),
            replace(ClientSettings(command=FAULTY, max_restarts=2), **settings),
            environ=os.environ,
            output=said,
        )
        async with client.running():
            handle = Handle(client, said)
            yield handle
        assert client.pid is None
        assert client.trace_path is None or not client.trace_path.exists(), (
            "a trace that nobody named is gone"
        )

    return begin


async def test_requests_run_together_and_are_told_in_pieces(
    start: Start, reference: list[dict[str, Any]]
) -> None:
    async with start(config={"kv_cache_dtype": "bfloat16"}) as handle:
        await handle.reach(EngineState.READY)
        cases = reference[:3]
        ended: dict[int, Ended] = {}

        async def one(number: int) -> None:
            ended[number] = await handle.run(cases[number]["token_ids"], max_tokens=4)

        async with anyio.create_task_group() as tasks:
            for number in range(len(cases)):
                tasks.start_soon(one, number)
        for number, case in enumerate(cases):
            assert ended[number].tokens == case["greedy32"][:4]
            assert ended[number].delta.finish_reason is FinishReason.LENGTH
        client = handle.client
        assert client.stats is not None
        assert client.stats.num_used_blocks == 0
        ledger = client.ledger()
        assert ledger is not None
        assert ledger["segments"]["kv"] == pytest.approx(16 << 20, rel=0.01)
        assert client.statistics()["total"]["live_bytes"] == sum(ledger["segments"].values())  # type: ignore[index]
        assert client.trace_path is not None
        assert client.trace_path.stat().st_size > 256 * 576
        assert not client.failures.list()


async def test_leaving_aborts_within_a_step(start: Start) -> None:
    async with start() as handle:
        await handle.reach(EngineState.READY)
        stream = handle.client.generate(handle.request([faulty_engine.SLOW, 5], max_tokens=400), None)
        async for _ in stream:
            break
        await stream.aclose()
        ended = await handle.run([faulty_engine.SLOW, 6], max_tokens=3)
        assert len(ended.tokens) == 3
        stats = handle.client.stats
        assert stats is not None
        assert (stats.num_running, stats.num_used_blocks) == (0, 0)
        assert stats.step < 40, "the request that was left went on"


async def test_a_queue_that_is_full_and_a_request_that_cannot_be_served(start: Start) -> None:
    async with start(max_queued=1, config={"max_num_seqs": 1}) as handle:
        with pytest.raises(EngineDeadError, match="starting"):
            await handle.run([5])
        await handle.reach(EngineState.READY)
        streams = [
            handle.client.generate(handle.request([faulty_engine.SLOW, n], max_tokens=50), None)
            for n in (1, 2)
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, streams[0])
            tasks.start_soon(anext, streams[1])
            await anyio.sleep(0.01)
            with pytest.raises(QueueFullError, match=r"--max-queued-requests 1"):
                await handle.run([5])
            tasks.cancel_scope.cancel()
        with pytest.raises(RequestError, match="vocabulary"):
            await handle.run([10**6])
        with pytest.raises(RequestError, match="--max-model-len"):
            await handle.run([5] * 512)
        assert len((await handle.run([5], n=2, max_tokens=2)).tokens) == 4


async def test_a_step_that_throws(start: Start) -> None:
    """What had output ends at once; what had none runs again, and is refused after a second failing step."""
    async with start(config={"max_num_seqs": 2}) as handle:
        await handle.reach(EngineState.READY)
        ended: dict[str, Ended] = {}

        async def one(name: str, prompt: list[int]) -> None:
            ended[name] = await handle.run(prompt)

        stream = handle.client.generate(handle.request([faulty_engine.SLOW, 8], max_tokens=400), None)
        await anext(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "culprit", [faulty_engine.THROWS, 1])
            tasks.start_soon(one, "waiting", [5, 6])
            rest = [delta async for delta in stream]
            assert handle.client.state is EngineState.RESTARTING
            with pytest.raises(EngineDeadError) as refused:
                await handle.run([5])
        assert rest[-1].finish_reason is FinishReason.ERROR
        assert rest[-1].failure_id == refused.value.failure_id
        record = handle.record(rest[-1].failure_id)
        assert record["fatal"]
        assert record["what"] == "RuntimeError: a kernel went astray"
        assert any("do_harm" in line for line in record["exception"]["traceback"])
        assert [request["request_id"] for request in record["requests"]] == ["r1", "r2"]
        assert record["requests"][0]["output_tokens"] >= 1
        assert record["requests"][0]["params"]["max_tokens"] == 400
        assert all(request["prompt"] is None for request in record["requests"])
        assert all(request["prompt_token_ids"] is None for request in record["requests"])
        assert record["ledger"]["tags"]
        assert record["trace"]

        assert ended["culprit"].delta.finish_reason is FinishReason.ERROR
        assert ended["culprit"].delta.error == (
            "request r2 was in the step of 2 failures and is not run again"
        )
        assert ended["culprit"].delta.failure_id != record["id"]
        assert len(ended["waiting"].tokens) == 8, (
            "it was in one failing step, and ran to its end in the third engine"
        )
        assert (handle.client.generation, handle.client.restarts) == (3, 2)
        assert len((await handle.run([5])).tokens) == 8


async def test_kill_9(start: Start) -> None:
    async with start(config={"record_prompts": True}) as handle:
        await handle.reach(EngineState.READY)
        stream = handle.client.generate(handle.request([faulty_engine.SLOW, 8], max_tokens=400), None)
        await anext(stream)
        killed = handle.client.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        rest = [delta async for delta in stream]
        assert handle.client.state is EngineState.RESTARTING
        assert rest[-1].failure_id == handle.client.last_failure_id
        record = handle.record(rest[-1].failure_id)
        assert record["what"] == f"the engine process ({killed}) was killed by SIGKILL"
        assert record["pid"] == killed
        [request] = record["requests"]
        assert request["request_id"] == "r1"
        assert request["output_tokens"] >= 1
        assert request["prompt_token_ids"] == [faulty_engine.SLOW, 8]
        assert request["prompt"]
        assert record["step"]["num_running"] == 1
        assert record["ledger"]["segments"]["kv"] > 0
        assert any("tag=kv/" in line for line in record["trace"])
        assert f"engine-fatal: EngineCore busy loop ended: {record['what']}" in handle.said.getvalue()
        await handle.reach(EngineState.READY, generation=2)
        assert len((await handle.run([5])).tokens) == 8


async def test_a_death_inside_an_allocation_names_it(start: Start) -> None:
    async with start() as handle:
        await handle.reach(EngineState.READY)
        ended = await handle.run([faulty_engine.KILLS_ALLOCATING, 2])
        assert "2 failures" in str(ended.delta.error)
        allocation = handle.record()["allocation"]
        assert (allocation["size"], allocation["tag"]) == (4096, "workspace/last")
        assert allocation["requests"] == ["r1"]
        assert "PENDING" in handle.record()["trace"][-1]


async def test_a_hang_is_told_with_its_stacks(start: Start) -> None:
    async with start(engine_timeout=1.0, max_restarts=5) as handle:
        await handle.reach(EngineState.READY)
        ended = await handle.run([faulty_engine.HANGS, 2])
        assert "2 failures" in str(ended.delta.error)
        record = handle.record()
        assert "no step finished in 1 s" in record["what"]
        assert any("do_harm" in line for line in record["exception"]["traceback"])
        assert "engine-fatal: EngineCore busy loop hangs: " in handle.said.getvalue()
        await handle.reach(EngineState.READY, generation=3)
        await anyio.sleep(1.5)
        assert handle.client.state is EngineState.READY, "an idle engine does not hang"


async def test_a_stopped_process_is_killed_without_stacks(start: Start) -> None:
    async with start(engine_timeout=0.5, max_restarts=0) as handle:
        await handle.reach(EngineState.READY)
        os.kill(handle.client.pid, signal.SIGSTOP)
        ended = await handle.run([5])
        assert ended.delta.failure_id is not None
        with anyio.fail_after(20):
            await handle.client.exhausted.wait()
        assert handle.client.state is EngineState.DEAD


async def test_memory_that_one_request_lacks_fails_that_request_only(start: Start) -> None:
    async with start() as handle:
        await handle.reach(EngineState.READY)
        ended: dict[int, Ended] = {}

        async def one(token: int) -> None:
            ended[token] = await handle.run([token, 3])

        async with anyio.create_task_group() as tasks:
            for token in (faulty_engine.TOO_LARGE, 5, 6):
                tasks.start_soon(one, token)
        failed = ended[faulty_engine.TOO_LARGE].delta
        assert failed.finish_reason is FinishReason.ERROR
        record = handle.record(failed.failure_id)
        assert not record["fatal"]
        assert record["allocation"]["tag"] == "workspace/too_large"
        assert record["allocation"]["requests"] == [request["request_id"] for request in record["requests"]]
        assert [len(ended[token].tokens) for token in (5, 6)] == [8, 8]
        assert len((await handle.run([5])).tokens) == 8, "the next request succeeds"
        assert handle.client.generation == 1
        # The batch was tried together first: its failure counts too.
        assert handle.client.alloc_failures()["full"] >= 1


async def test_memory_that_the_load_lacks(start: Start) -> None:
    config = {"kv_cache_memory": 64 << 20, "device_memory": 16 << 20}
    async with start(config=config, max_restarts=1) as handle:
        await handle.reach(EngineState.RESTARTING)
        record = handle.record()
        assert record["allocation"]["why"] == "full"
        assert record["allocation"]["tag"].startswith("kv/")
        assert {lever["flag"] for lever in record["levers"]} & {"--device-memory", "--kv-cache-memory"}
        with anyio.fail_after(60):
            await handle.client.exhausted.wait()
        assert handle.client.state is EngineState.DEAD
        assert [entry["fatal"] for entry in handle.client.failures.list()] == [True, True]
        with pytest.raises(EngineDeadError):
            await handle.run([5])


async def test_a_death_in_the_load(start: Start) -> None:
    async with start(command=EngineCommand([*FAULTY.arguments, "--kill-in-load"]), max_restarts=0) as handle:
        with anyio.fail_after(60):
            await handle.client.exhausted.wait()
        record = handle.record()
        assert record["doing"].startswith("loading ")
        assert record["requests"] == []


async def test_what_no_restart_would_mend_is_refused_at_once(start: Start) -> None:
    async with start(config={"max_model_len": 10**6}) as handle:
        with anyio.fail_after(60):
            await handle.client.exhausted.wait()
        refusal = handle.client.refusal
        assert refusal is not None
        assert refusal.is_usage
        assert "--max-model-len" in refusal.text
        assert handle.client.generation == 1
        assert not handle.client.failures.list()


async def test_draining_waits_and_then_ends_what_is_left_with_an_error(start: Start) -> None:
    async with start() as handle:
        await handle.reach(EngineState.READY)
        ended: list[Ended] = []

        async def one(count: int) -> None:
            ended.append(await handle.run([faulty_engine.SLOW, 2], max_tokens=count))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, 5)
            await anyio.sleep(0.01)
            await handle.client.drain(60)
            assert ended, "it waited"
            tasks.start_soon(one, 500)
            await anyio.sleep(0.01)
            await handle.client.drain(0.1)
        assert [item.delta.finish_reason for item in ended] == [FinishReason.LENGTH, FinishReason.ABORT]
        assert ended[1].delta.error == "the server is stopping"
