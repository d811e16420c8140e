"""Which steps run as a graph, what they are padded with, and what becomes of graphs. Needs no GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda.graphs import DecodeBucket, StepGraphs, bucket_sizes, padded
from engine.backend.cuda.inputs import InputWriter, io_bytes
from engine.backend.cuda.staging import PinnedBuffer
from engine.backend.cuda.tensor import CudaTensor
from engine.backend.protocol import DType, StepBatch, StepLimits
from engine.errors import DeviceError, DeviceLostError
from engine.memory.resources import HostMemoryResource
from tests.backend.cuda.host_device import HostDevice, memory_at
from tests.backend.cuda.reference import Sequences

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: vtserve[cuda]")

LIMITS = StepLimits(
    max_tokens=4096, max_seqs=48, max_blocks_per_seq=512, max_logits_rows=48, vocab_size=100, block_size=16
)


def decode_batch(lengths: list[int]) -> StepBatch:
    columns = LIMITS.max_blocks_per_seq
    return Sequences(lengths, [1] * len(lengths), 16).batch(np.random.default_rng(0), 30_000, columns)


# -- buckets -----------------------------------------------------------------------------------------------


@given(st.integers(1, 2000))
def test_sizes_ascend_up_to_the_limit(limit: int) -> None:
    sizes = bucket_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    assert sizes[0] == 1


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=48))
def test_a_bucket_has_room_for_its_step(lengths: list[int]) -> None:
    graphs = StepGraphs(Recorder(), enabled=True)  # type: ignore[arg-type]
    graphs.reserve(LIMITS)
    bucket = graphs.bucket_of(decode_batch(lengths))
    assert bucket is not None
    assert len(lengths) <= bucket.sequences <= LIMITS.max_seqs
    assert max(lengths) <= bucket.length <= LIMITS.max_blocks_per_seq * LIMITS.block_size


def test_only_decode_steps_have_a_bucket() -> None:
    graphs = StepGraphs(Recorder(), enabled=True)  # type: ignore[arg-type]
    graphs.reserve(LIMITS)
    rng = np.random.default_rng(0)
    prefill = Sequences([9, 40], [1, 30], 16).batch(rng, 60, 512)
    chunk = Sequences([40], [1], 16).batch(rng, 60, 512)
    chunk.logits_rows = chunk.logits_rows[:0]  # one token of a prompt whose end is not reached
    nothing = Sequences([1], [1], 16).batch(rng, 60, 512)
    for name in ("token_ids", "logits_rows", "seq_lens"):
        setattr(nothing, name, getattr(nothing, name)[:0])
    assert [graphs.bucket_of(batch) for batch in (prefill, chunk, nothing)] == [None] * 3
    assert graphs.bucket_of(decode_batch([40])) == DecodeBucket(1, 1024)
    assert StepGraphs(Recorder(), enabled=False).bucket_of(decode_batch([40])) is None  # type: ignore[arg-type]


# -- padding -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(0, 7))
def test_padding_reads_the_first_slot_and_stores_nothing(lengths: list[int], added: int) -> None:
    batch, count = decode_batch(lengths), len(lengths)
    step = padded(batch, count + added)
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "block_tables", "logits_rows"):
        whole, own = getattr(step, name), getattr(batch, name)
        assert whole.dtype == own.dtype
        assert len(whole) == count + added
        np.testing.assert_array_equal(whole[:count], own)
    assert step.query_start.dtype == np.int32
    np.testing.assert_array_equal(step.query_start, np.arange(count + added + 1))
    np.testing.assert_array_equal(step.logits_rows, np.arange(count + added))
    assert (step.slot_mapping[count:] == -1).all()
    assert (step.seq_lens[count:] == 1).all()
    assert not step.positions[count:].any()
    assert not step.block_tables[count:].any()


def test_inputs_of_a_bucket_lie_at_one_place() -> None:
    device: Any = HostDevice()
    memory = HostMemoryResource(1 << 24)
    size = io_bytes(LIMITS)
    buffer = memory.allocate(size)
    pinned = (PinnedBuffer(device, memory, size), PinnedBuffer(device, memory, size))
    writer = InputWriter(device, CudaTensor.of(buffer, (size,), DType.UINT8), pinned, LIMITS)
    bucket = DecodeBucket(8, 4096)
    steps = []
    for lengths in ([1], [4096] * 8, [17, 1025, 3]):
        batch = decode_batch(lengths)
        step = writer.write(batch, bucket)
        device.synchronize()
        steps.append(step)
        assert step.num_tokens == 8
        assert step.wanted_rows == len(lengths)
        tables = memory_at(step.block_tables.address, step.block_tables.nbytes)
        tables = tables.view(np.int32).reshape(step.block_tables.shape)
        np.testing.assert_array_equal(tables[: len(lengths)], batch.block_tables[:, :256])
        assert not tables[len(lengths) :].any()
    for name in (
        "token_ids",
        "positions",
        "slot_mapping",
        "query_start",
        "seq_lens",
        "block_tables",
        "logits_rows",
    ):
        parts = [getattr(step, name) for step in steps]
        assert len({(part.address, part.shape) for part in parts}) == 1, name
    assert len({step.attention for step in steps}) == 1
    for part in pinned:
        part.close()
    buffer.close()


# -- graphs ------------------------------------------------------------------------------------------------


class Recorder:
    """A device whose graphs remember what they were captured from."""

    def __init__(self) -> None:
        self.error: DeviceError | None = None
        self.captured: list[Any] = []
        self.launched: list[Any] = []
        self.closed: list[Any] = []

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        if self.error is not None:
            raise self.error
        result = work()
        self.captured.append(result)
        return f"graph of {result}", result

    def launch_graph(self, graph: Any) -> None:
        self.launched.append(graph)

    def close_graphs(self, graphs: Iterable[Any]) -> None:
        self.closed += graphs


class Forward:
    """A model that tells which step it was given."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def __call__(self, inputs: Any) -> Any:
        self.steps.append(inputs)
        return inputs


@pytest.fixture
def setup() -> SimpleNamespace:
    device = Recorder()
    graphs = StepGraphs(device, enabled=True)  # type: ignore[arg-type]
    graphs.reserve(LIMITS)
    return SimpleNamespace(device=device, graphs=graphs, forward=Forward())


SMALL, LARGE = DecodeBucket(1, 1024), DecodeBucket(8, 1024)


def test_a_bucket_runs_first_then_is_captured_then_launched(setup: SimpleNamespace) -> None:
    results = [setup.graphs.run(setup.forward, step, SMALL) for step in ("a", "b", "c", "d")]
    assert setup.forward.steps == ["a", "b"]
    assert setup.device.captured == ["b"]
    assert setup.device.launched == ["graph of b"] * 3
    assert results == ["a", "b", "b", "b"], "the output of every launch is where the capture put it"


def test_buckets_have_their_own_graphs(setup: SimpleNamespace) -> None:
    for step, bucket in (("a", SMALL), ("b", LARGE), ("c", SMALL), ("d", LARGE), ("e", SMALL)):
        setup.graphs.run(setup.forward, step, bucket)
    assert setup.device.launched == ["graph of c", "graph of d", "graph of c"]
    assert setup.graphs.count == 2


def test_steps_without_a_bucket_are_never_captured(setup: SimpleNamespace) -> None:
    assert [setup.graphs.run(setup.forward, step, None) for step in ("a", "b", "c")] == ["a", "b", "c"]
    assert setup.device.captured == []


def test_another_models_graphs_are_let_go(setup: SimpleNamespace) -> None:
    for step in ("a", "b"):
        setup.graphs.run(setup.forward, step, SMALL)
    other = Forward()
    assert setup.graphs.run(other, "c", SMALL) == "c"
    assert other.steps == ["c"]
    assert setup.device.closed == ["graph of b"]


def test_without_memory_for_graphs_steps_run_on(
    setup: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for step in ("a", "b"):
        setup.graphs.run(setup.forward, step, SMALL)
    setup.device.error = DeviceError("CUDA: capturing a graph failed (CUDA_ERROR_OUT_OF_MEMORY)", code=2)
    with caplog.at_level(logging.WARNING):
        results = [setup.graphs.run(setup.forward, step, LARGE) for step in ("c", "d", "e")]
    assert results == ["c", "d", "e"]
    assert setup.device.closed == ["graph of b"], "what the others took is given back"
    assert setup.graphs.bucket_of(decode_batch([5])) is None
    assert len(caplog.messages) == 1
    assert "--gpu-memory-utilization" in caplog.text


@pytest.mark.parametrize("error", [DeviceError("a launch failed", code=1), DeviceLostError("gone", code=700)])
def test_other_errors_of_a_capture_are_the_steps(setup: SimpleNamespace, error: DeviceError) -> None:
    setup.graphs.run(setup.forward, "a", SMALL)
    setup.device.error = error
    with pytest.raises(DeviceError) as caught:
        setup.graphs.run(setup.forward, "b", SMALL)
    assert caught.value is error


def test_closing_twice_lets_go_once(setup: SimpleNamespace) -> None:
    for step in ("a", "b"):
        setup.graphs.run(setup.forward, step, SMALL)
    setup.graphs.close()
    setup.graphs.close()
    assert setup.device.closed == ["graph of b"]
    assert setup.graphs.count == 0
