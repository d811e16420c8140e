"""Weights and inputs on their way to the device, and what that takes of its memory. Needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend.cuda import segments, staging
from engine.backend.cuda.inputs import InputWriter, io_bytes
from engine.backend.cuda.layout import NVFP4_EXPONENT
from engine.backend.cuda.linear import CudaLinear, LinearSegment
from engine.backend.cuda.loading import WeightUploader
from engine.backend.cuda.staging import PinnedBuffer, Staging
from engine.backend.cuda.tensor import CudaTensor
from engine.backend.protocol import DType, LinearSource, StepLimits, WeightFormat
from engine.errors import CheckpointError
from engine.memory.adaptors.fault_injecting import Fault, FaultInjectingMemoryResource
from engine.memory.adaptors.statistics import StatisticsMemoryResource
from engine.memory.errors import AllocationError
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from tests.backend.cuda.host_device import HostDevice, memory_at
from tests.backend.cuda.reference import Sequences, codes_of, pack_fp8, pack_nvfp4, random_linear

CHUNK = 1 << 13


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(segments, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "_SHARED_COPY_BYTES", 1000)


class Setup:
    def __init__(self) -> None:
        self.device = HostDevice()
        self.memory = StatisticsMemoryResource(HostMemoryResource(1 << 30))
        self.pinned = HostMemoryResource(1 << 30)
        self.staging = Staging(self.device, self.pinned)  # type: ignore[arg-type]
        self.uploader = WeightUploader(self.device, self.memory, self.staging)  # type: ignore[arg-type]

    def load(self, *parts: LinearSource) -> CudaLinear:
        with memory_scope("weights/layer"):
            return self.uploader.load(parts)

    def close(self) -> None:
        self.staging.close()
        assert self.pinned.live == 0


@pytest.fixture
def setup():
    setup = Setup()
    yield setup
    setup.close()


def read(tensor: CudaTensor | None) -> np.ndarray:
    assert tensor is not None
    return memory_at(tensor.address, tensor.nbytes).view(tensor.dtype.carrier).reshape(tensor.shape)


def close(linear: CudaLinear) -> None:
    for segment in linear.segments:
        segment.weight.buffer.close()


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 5 * CHUNK + 77])
def test_what_goes_up_comes_down(setup: Setup, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    setup.staging.upload(target.ctypes.data, data)
    np.testing.assert_array_equal(setup.staging.download(target.ctypes.data, size), data)
    np.testing.assert_array_equal(target, data)
    assert setup.staging.nbytes == 2 * CHUNK


def test_closed_staging_holds_nothing_and_opens_again(setup: Setup) -> None:
    data = np.arange(10, dtype=np.int32)
    target = np.zeros(10, np.int32)
    setup.staging.upload(target.ctypes.data, data)
    setup.staging.close()
    assert setup.staging.nbytes == setup.pinned.live == 0
    np.testing.assert_array_equal(target, data)
    setup.staging.upload(target.ctypes.data, data[::-1])
    setup.device.stream.sync()
    np.testing.assert_array_equal(target, data[::-1])


def expected_bytes(segment: LinearSegment, parts: list[LinearSource]) -> np.ndarray:
    weight = np.concatenate([part.weight for part in parts])
    if segment.format is WeightFormat.NVFP4:
        scales = [part.group_scales for part in parts if part.group_scales is not None]
        return pack_nvfp4(codes_of(weight), np.concatenate(scales))
    return pack_fp8(weight) if segment.format is WeightFormat.FP8 else weight


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("rows", [(16,), (40, 24, 5, 33), (150, 7), (1, 1)])
def test_parts_are_stacked_with_their_own_scales(
    setup: Setup, format: WeightFormat, rows: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    parts = [random_linear(rng, format, count, 272, bias=index == 1) for index, count in enumerate(rows)]
    linear = setup.load(*parts)
    assert linear.shape == (sum(rows), 272)
    (segment,) = linear.segments
    np.testing.assert_array_equal(read(segment.weight), expected_bytes(segment, parts))
    if format is WeightFormat.BF16:
        assert segment.row_scale is None
    else:
        exponent = NVFP4_EXPONENT if format is WeightFormat.NVFP4 else 0
        scales = [np.full(part.shape[0], part.global_scale * 2.0**exponent, np.float32) for part in parts]
        np.testing.assert_array_equal(read(segment.row_scale), np.concatenate(scales))
    if len(rows) > 1:
        bias = [np.zeros(part.shape[0]) if part.bias is None else part.bias for part in parts]
        np.testing.assert_array_equal(read(segment.bias), np.concatenate(bias))
    else:
        assert segment.bias is None
    assert linear.nbytes == segment.weight.buffer.size
    close(linear)


def test_neighbours_of_one_format_share_a_segment(setup: Setup) -> None:
    rng = np.random.default_rng(1)
    formats = [WeightFormat.NVFP4, WeightFormat.NVFP4, WeightFormat.FP8, WeightFormat.NVFP4]
    linear = setup.load(*(random_linear(rng, format, 20, 64) for format in formats))
    assert [(s.format.value, s.first_row, s.rows) for s in linear.segments] == [
        ("nvfp4", 0, 40),
        ("fp8", 40, 20),
        ("nvfp4", 60, 20),
    ]
    close(linear)


@pytest.mark.parametrize(
    ("format", "rows"), [(WeightFormat.NVFP4, 500), (WeightFormat.FP8, 500), (WeightFormat.NVFP4, 3)]
)
def test_repacking_takes_no_more_than_a_chunk_or_the_tensor(
    setup: Setup, format: WeightFormat, rows: int
) -> None:
    source = random_linear(np.random.default_rng(2), format, rows, 272)
    tensor_bytes = source.weight.nbytes + (0 if source.group_scales is None else source.group_scales.nbytes)
    linear = setup.load(source)
    statistics = setup.memory.statistics()
    assert set(statistics.by_tag) == {"weights/layer", "repack/layer"}
    scratch = statistics.by_tag["repack/layer"]
    assert scratch.peak_bytes == min(CHUNK, tensor_bytes)
    assert (scratch.allocations, scratch.frees) == (1, 1)
    assert statistics.by_tag["weights/layer"].live_bytes == linear.nbytes
    assert statistics.total.peak_bytes <= linear.nbytes + tensor_bytes
    close(linear)
    assert setup.memory.statistics().total.live_bytes == 0


def test_bfloat16_is_not_repacked(setup: Setup) -> None:
    linear = setup.load(random_linear(np.random.default_rng(2), WeightFormat.BF16, 50, 64))
    assert set(setup.memory.statistics().by_tag) == {"weights/layer"}
    assert linear.nbytes == 50 * 64 * 2
    close(linear)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_load_that_fails_keeps_nothing(fails: int) -> None:
    setup = Setup()
    upstream = StatisticsMemoryResource(HostMemoryResource(1 << 30))
    memory = FaultInjectingMemoryResource(upstream, [Fault(nth=fails)])
    setup.uploader = WeightUploader(setup.device, memory, setup.staging)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    with pytest.raises(AllocationError):
        setup.load(
            random_linear(rng, WeightFormat.NVFP4, 40, 64), random_linear(rng, WeightFormat.FP8, 40, 64)
        )
    statistics = upstream.statistics().total
    assert statistics.live_bytes == 0
    assert statistics.allocations == fails - 1
    setup.close()


def test_parts_that_do_not_fit_each_other_are_refused(setup: Setup) -> None:
    rng = np.random.default_rng(4)
    with pytest.raises(CheckpointError, match="nvfp4-8x80: 80 columns, its neighbours have 64"):
        setup.load(
            random_linear(rng, WeightFormat.NVFP4, 8, 64), random_linear(rng, WeightFormat.NVFP4, 8, 80)
        )
    odd = LinearSource(
        "odd", WeightFormat.NVFP4, (4, 24), np.zeros((4, 12), np.uint8), np.zeros((4, 1), np.uint8)
    )
    with pytest.raises(CheckpointError, match="odd: NVFP4 needs columns in groups of 16, not 24"):
        setup.load(odd)


# -- inputs ------------------------------------------------------------------------------------------------

LIMITS = StepLimits(
    max_tokens=64, max_seqs=4, max_blocks_per_seq=200, max_logits_rows=4, vocab_size=10, block_size=16
)


class Inputs:
    def __init__(self) -> None:
        self.device = HostDevice()
        self.memory = HostMemoryResource(1 << 20)
        size = io_bytes(LIMITS)
        self.buffer = self.memory.allocate(size)
        self.io = CudaTensor.of(self.buffer, (size,), DType.UINT8)
        self.pinned = tuple(PinnedBuffer(self.device, self.memory, size) for _ in range(2))  # type: ignore[arg-type]
        self.writer = InputWriter(self.device, self.io, self.pinned, LIMITS)  # type: ignore[arg-type]

    def close(self) -> None:
        for pinned in self.pinned:
            pinned.close()
        self.buffer.close()
        assert self.memory.live == 0


def test_steps_in_flight_do_not_disturb_each_other() -> None:
    inputs = Inputs()
    rng = np.random.default_rng(0)
    batches = [Sequences([33, 5, 700], [1, 5, 30], 16).batch(rng, 60, 100) for _ in range(4)]
    # Nothing runs on the device while all are written; each is read when its own copy has run.
    written = [inputs.writer.write(batch) for batch in batches]
    for index, (batch, step) in enumerate(zip(batches, written, strict=True)):
        inputs.device.stream.run(index + 1)
        if index < 2:
            continue  # overwritten by the next two in the meantime
        for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens", "logits_rows"):
            np.testing.assert_array_equal(read(getattr(step, name)), getattr(batch, name))
        columns = step.block_tables.shape[1]
        assert 44 <= columns <= 100
        np.testing.assert_array_equal(read(step.block_tables), batch.block_tables[:, :columns])
    assert len(inputs.device.copied) == 4
    inputs.close()


def test_the_largest_step_fits() -> None:
    inputs = Inputs()
    batch = Sequences([3200, 3200, 3200, 3200], [16, 16, 16, 16], 16).batch(
        np.random.default_rng(0), 900, 200
    )
    step = inputs.writer.write(batch)
    inputs.device.stream.sync()
    np.testing.assert_array_equal(read(step.block_tables), batch.block_tables)
    assert inputs.device.copied[0] <= io_bytes(LIMITS)
    inputs.close()


@pytest.mark.parametrize(
    ("sequences", "what"),
    [
        (Sequences([65], [65], 16), "65 tokens, room was reserved for 64"),
        (Sequences([1] * 5, [1] * 5, 16), "5 sequences, room was reserved for 4"),
    ],
)
def test_a_step_beyond_the_limits_is_refused(sequences: Sequences, what: str) -> None:
    inputs = Inputs()
    with pytest.raises(ValueError, match=what):
        inputs.writer.write(sequences.batch(np.random.default_rng(0), 10, 8))
    inputs.close()
