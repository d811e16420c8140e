"""Starting an engine, and what is left when it does not start."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from cuda.core import Buffer, MemoryResource

from app.settings import parse_byte_size
from engine.compose import Engine, build_engine
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigurationError, EngineDeadError
from engine.failure_record import FailureRecord, read_failure
from engine.memory.adaptors import (
    Fault,
    FaultInjectingMemoryResource,
    LimitingMemoryResource,
    StatisticsMemoryResource,
)
from engine.memory.errors import OutOfMemoryError, Why
from engine.memory.resources import HostMemoryResource, PlanningMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings
from engine.messages import AddRequest, FinishReason
from engine.sampling_params import SamplingParams

ON = TraceSettings(trace=True, min_bytes=64 << 10)


@pytest.fixture
def model(shared_checkpoints: Path) -> str:
    return str(shared_checkpoints / "llama-untied" / "NVFP4-FP8KV-ct")


class Start:
    """A start of an engine, and what it left."""

    def __init__(self, directory: Path, model: str, **flags: Any) -> None:
        self.output = io.StringIO()
        self.memory = flags.pop("memory", None)
        trace = flags.pop("trace", ON)
        config = EngineConfig(
            model=model, **{"device": "cpu", "threads": 1, "failure_dir": str(directory), **flags}
        )
        self.engine: Engine | None = None
        self.error: Exception | None = None
        try:
            self.engine = build_engine(
                config, trace=trace, output=self.output, environ={}, memory=self.memory
            )
        except (EngineDeadError, ConfigurationError, CheckpointError) as error:
            self.error = error
        self.records = [read_failure(path) for path in directory.glob("*.json")]

    @property
    def lines(self) -> list[str]:
        return self.output.getvalue().splitlines()

    def record(self) -> FailureRecord:
        assert isinstance(self.error, EngineDeadError)
        [record] = self.records
        assert record.id == self.error.failure_id
        return record

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def test_out_of_memory_in_the_weights(tmp_path: Path, model: str) -> None:
    start = Start(tmp_path, model, device_memory=300_000)
    record = start.record()
    cause = start.error.__cause__ if start.error else None
    assert isinstance(cause, OutOfMemoryError)
    assert cause.why in (Why.CAP, Why.FULL)
    assert record.doing == f"loading {model}"
    assert record.fatal
    allocation = record.allocation
    assert allocation is not None
    assert allocation["tag"].startswith(("weights/", "repack/"))
    assert allocation["sequence"] > 1
    assert allocation["size"] > 0
    assert allocation["site"]
    assert record.ledger is not None
    assert record.ledger["total"] == 300_000
    assert record.ledger["segments"]["weights"] > 0
    assert record.ledger["residual"] == 0
    assert "FAILED" in record.trace[-1]
    assert any("FAILED" in line for line in start.lines)
    assert any(line.startswith(f"engine-fatal: loading {model}: allocation #") for line in start.lines)
    assert any(line.startswith("engine-fatal: to make it fit: --device-memory ") for line in start.lines)


def test_the_levers_of_a_record_do_what_they_say(tmp_path: Path, model: str) -> None:
    # 13 MiB for the activations and logits of a large step, and 16 MiB of KV cache.
    flags: dict[str, Any] = {
        "device_memory": 32 << 20,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "kv_cache_memory": 16 << 20,
    }
    record = Start(tmp_path / "first", model, **flags).record()
    enough = [lever for lever in record.levers if lever.enough]
    assert {lever.flag for lever in enough} >= {
        "--device-memory",
        "--kv-cache-memory",
        "--max-num-batched-tokens",
    }
    for index, lever in enumerate(enough):
        name = lever.flag.removeprefix("--").replace("-", "_")
        value: Any = lever.value
        if name in ("device_memory", "kv_cache_memory"):
            value = parse_byte_size(value)
        elif name == "gpu_memory_utilization":
            value = float(value)
        elif name != "kv_cache_dtype":
            value = int(value)
        start = Start(tmp_path / str(index), model, **{**flags, name: value})
        assert start.error is None, f"{lever} is not enough"
        start.close()


@pytest.mark.parametrize("tag", ["weights", "workspace", "kv/model.layers.1.v", "io"])
def test_nothing_is_left_of_a_start_that_failed(tmp_path: Path, model: str, tag: str) -> None:
    host = HostMemoryResource(1 << 28)
    counted = StatisticsMemoryResource(FaultInjectingMemoryResource(host, [Fault(tag=tag, nth=1)]))
    start = Start(tmp_path, model, memory=counted, kv_cache_memory=1 << 20)
    record = start.record()
    assert record.allocation is not None
    assert record.allocation["why"] == "injected"
    assert record.allocation["tag"].startswith(tag)
    assert counted.statistics().total.failures == 1
    assert host.live == 0


def test_what_does_not_fit_the_share_fails_as_a_cap(tmp_path: Path, model: str) -> None:
    start = Start(
        tmp_path, model, device_memory=64 << 20, gpu_memory_utilization=0.2, max_num_batched_tokens=2048
    )
    record = start.record()
    assert record.allocation is not None
    assert record.allocation["why"] == "cap"
    share = next(lever for lever in record.levers if lever.flag == "--gpu-memory-utilization")
    assert 0.2 < float(share.value) <= 1
    assert "--gpu-memory-utilization" in "\n".join(start.lines)


def test_a_resource_that_was_handed_in_is_used_up_to_its_cap(tmp_path: Path, model: str) -> None:
    host = HostMemoryResource(1 << 30)
    flags: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 64}
    start = Start(tmp_path, model, memory=LimitingMemoryResource(host, 16 << 20), **flags)
    assert start.engine is not None
    assert (4 << 20) < host.live <= 0.9 * (16 << 20)
    start.close()


def test_levers_under_the_cap_of_a_resource_that_was_handed_in(tmp_path: Path, model: str) -> None:
    cap = LimitingMemoryResource(HostMemoryResource(1 << 30), 20 << 20)
    flags: dict[str, Any] = {"memory": cap, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    record = Start(tmp_path / "first", model, kv_cache_memory=30 << 20, **flags).record()
    assert record.allocation is not None
    assert record.allocation["why"] == "cap"
    lever = next(lever for lever in record.levers if lever.flag == "--kv-cache-memory")
    assert lever.enough
    start = Start(tmp_path / "second", model, kv_cache_memory=parse_byte_size(lever.value), **flags)
    assert start.error is None
    start.close()


def test_a_cache_too_small_for_the_length_is_refused_before_the_load(tmp_path: Path, model: str) -> None:
    memory = StatisticsMemoryResource(HostMemoryResource(1 << 28))
    start = Start(tmp_path, model, memory=memory, kv_cache_memory=40_000, max_model_len=2048)
    assert isinstance(start.error, ConfigurationError)
    assert "--max-model-len 2048 takes 512.0 KiB of KV cache" in str(start.error)
    assert memory.statistics().total.allocations == 0
    assert start.records == []


def test_the_cache_takes_what_the_share_leaves(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine"):
        start = Start(tmp_path, model, device_memory=16 << 20, max_num_seqs=64)
    assert start.engine is not None
    house = start.engine.house
    assert 0 <= house.available < 2 * 4096, "less than a block is left"
    assert house.ledger().segments["kv"] == start.engine.kv_bytes
    assert start.engine.limits.max_model_len == 2048
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("KV cache: ") and "sequences of 2,048 tokens" in line for line in lines)
    start.close()
    assert house.ledger().free == 16 << 20


def test_a_length_that_was_not_asked_for_shrinks(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        start = Start(tmp_path, model, kv_cache_memory=40_000)
    assert start.engine is not None
    assert start.engine.limits.max_model_len == 9 * 16
    assert any(
        "max_model_len is 144, not the model's 2,048" in record.getMessage() for record in caplog.records
    )
    start.close()


def test_off_means_absent(tmp_path: Path, model: str) -> None:
    memory = HostMemoryResource(1 << 28)
    start = Start(tmp_path, model, memory=memory, trace=TraceSettings(), kv_cache_memory=1 << 20)
    assert start.engine is not None
    assert start.engine.house.resource is memory
    assert start.lines == []
    start.close()


class ForeignMemory(MemoryResource):
    """A resource of someone else's: cuda.core's interface and no more."""

    is_device_accessible = False
    is_host_accessible = True
    device_id = -1

    def __init__(self) -> None:
        self.host = HostMemoryResource(1 << 28)

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:
        return Buffer.from_handle(self.host.acquire(size, None), size, mr=self, stream=stream)

    def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
        self.host.release(int(ptr), size, None)


def test_any_memory_resource_can_be_injected(tmp_path: Path, model: str) -> None:
    memory = ForeignMemory()
    start = Start(tmp_path, model, memory=memory, device_memory=16 << 20)
    assert start.engine is not None
    assert memory.host.live > 14 << 20, "the KV cache takes what the share leaves"
    assert start.engine.house.ledger().total == 16 << 20
    start.close()
    assert memory.host.live == 0


def test_memory_that_the_device_cannot_read_is_refused(tmp_path: Path, model: str) -> None:
    start = Start(tmp_path, model, memory=PlanningMemoryResource(1 << 28))
    assert isinstance(start.error, ConfigurationError)
    assert "PlanningMemoryResource" in str(start.error)


def test_a_length_that_the_cache_shortens_is_said_once(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vtserve"):
        start = Start(tmp_path, model, kv_cache_memory=64 << 10)
    assert start.engine is not None
    shorter = start.engine.limits.max_model_len
    start.close()
    assert [record.message for record in caplog.records if "max_model_len" in record.message] == [
        f"max_model_len is {shorter:,}, not the model's 2,048: that is what --kv-cache-memory holds"
    ]


def test_what_is_wrong_with_the_model_takes_no_record(tmp_path: Path, model: str) -> None:
    start = Start(tmp_path, str(tmp_path / "nothing" / "here"))
    assert start.error is not None
    assert start.records == []
    start = Start(tmp_path, model, max_model_len=4096)
    assert isinstance(start.error, ConfigurationError)
    assert "the model has 2048 positions" in str(start.error)
    assert start.records == []


# -- a step that runs out of memory ------------------------------------------------------------------------


def test_a_step_that_needs_more_than_there_is(tmp_path: Path, model: str) -> None:
    start = Start(tmp_path, model, device_memory=16 << 20)
    engine = start.engine
    assert engine is not None
    runner: Any = engine.core._runner
    forward = runner._forward

    def hungry(inputs: Any) -> Any:
        if inputs.num_tokens == 13:
            with memory_scope("workspace/scratch"):
                engine.house.resource.allocate(64 << 20)
        return forward(inputs)

    runner._forward = hungry
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.core.add_request(AddRequest(request_id="large", prompt_token_ids=[5] * 13, params=params))
    [update] = engine.core.step().updates
    assert update.finish_reason is FinishReason.ERROR
    [record] = [read_failure(path) for path in tmp_path.glob("*.json")]
    assert record.id == update.failure_id
    assert not record.fatal
    assert record.allocation is not None
    assert record.allocation["requests"] == ["large"]
    assert record.allocation["tag"] == "workspace/scratch"
    assert record.allocation["site"].startswith("tests/engine/test_compose.py:")
    assert record.step is not None
    assert record.step.prefill_tokens == 13
    assert "FAILED" in record.trace[-1]
    assert record.ledger is not None
    assert record.ledger["segments"]["kv"] == engine.kv_bytes
    engine.core.add_request(AddRequest(request_id="next", prompt_token_ids=[5] * 12, params=params))
    tokens = []
    while engine.core.has_unfinished_requests:
        tokens += [token for update in engine.core.step().updates for token in update.new_token_ids]
    assert len(tokens) == 4
    start.close()


def test_a_fatal_failures_lines_are_the_last_ones(tmp_path: Path, model: str) -> None:
    """Everything is printed while little memory is free: the teardown would push them off the screen."""
    start = Start(tmp_path, model, trace=TraceSettings(trace=True), memory=HostMemoryResource(6 << 20))
    record = start.record()
    assert record.allocation is not None
    assert record.ledger is not None
    assert record.ledger["free"] == record.allocation["free"], "the ledger is that of the failure"
    assert any(line.startswith("[host-alloc] FAILED") for line in start.lines[-5:]), start.lines[-5:]
    assert start.lines[-1].startswith("engine-fatal: ")
