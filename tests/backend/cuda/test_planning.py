"""What a plan for a GPU asks for, against the backend's own loading. Needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend.cuda import segments, staging
from engine.backend.cuda.gpus import GPUS
from engine.backend.cuda.layout import DeviceShape
from engine.backend.cuda.loading import WeightUploader
from engine.backend.cuda.planning import CudaLayout
from engine.backend.cuda.staging import Staging
from engine.backend.planning import PlanningBackend
from engine.backend.protocol import DType, LinearSource, StepLimits, WeightFormat
from engine.errors import CheckpointError, ConfigurationError
from engine.memory.adaptors import StatisticsMemoryResource
from engine.memory.resources import HostMemoryResource, PlanningMemoryResource
from engine.memory.scope import memory_scope
from tests.backend.cuda.host_device import HostDevice
from tests.backend.cuda.reference import random_linear

CHUNK = 1 << 13
SHAPE = DeviceShape(132, 232_448, hopper=True)
LIMITS = StepLimits(
    max_tokens=2048, max_seqs=64, max_blocks_per_seq=128, max_logits_rows=64, vocab_size=1000, block_size=16
)


def planned(*parts: LinearSource) -> tuple[StatisticsMemoryResource, PlanningBackend]:
    memory = StatisticsMemoryResource(PlanningMemoryResource(1 << 40))
    backend = PlanningBackend(memory, CudaLayout(SHAPE))
    with memory_scope("weights/layer"):
        backend.kept = backend.load_linear(parts)  # type: ignore[attr-defined]
    return memory, backend


@pytest.mark.parametrize("first", list(WeightFormat))
@pytest.mark.parametrize("second", list(WeightFormat))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(16, 32), (150, 7), (1, 1)])
def test_linear_layers_take_what_they_take_when_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
    first: WeightFormat,
    second: WeightFormat,
    bias: bool,
    rows: tuple[int, int],
) -> None:
    for module in (segments, staging):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    rng = np.random.default_rng(1)
    parts = [
        random_linear(rng, first, rows[0], 272, bias=bias),
        random_linear(rng, second, rows[1], 272, bias=False),
    ]
    device, memory = HostDevice(), StatisticsMemoryResource(HostMemoryResource(1 << 30))
    buffers = Staging(device, HostMemoryResource(1 << 30))  # type: ignore[arg-type]
    with memory_scope("weights/layer"):
        linear = WeightUploader(device, memory, buffers).load(parts)  # type: ignore[arg-type]
    plan, _ = planned(*parts)
    assert plan.statistics() == memory.statistics()
    assert plan.live == linear.nbytes
    assert (plan.statistics().by_tag.get("repack/layer") is not None) is (
        {first, second} != {WeightFormat.BF16}
    )
    del linear
    buffers.close()


def test_only_a_dense_layer_is_a_table() -> None:
    rng = np.random.default_rng(2)
    _, backend = planned(random_linear(rng, WeightFormat.BF16, 24, 32, bias=False))
    table = backend.as_table(backend.kept)  # type: ignore[attr-defined]
    assert (table.shape, table.dtype) == ((24, 32), DType.BFLOAT16)
    _, backend = planned(random_linear(rng, WeightFormat.FP8, 24, 32, bias=False))
    with pytest.raises(ValueError, match="only a BF16 linear"):
        backend.as_table(backend.kept)  # type: ignore[attr-defined]


def test_steps_take_more_where_activations_are_arranged() -> None:
    rng = np.random.default_rng(3)
    tags = {}
    for weight_format in (WeightFormat.NVFP4, WeightFormat.BF16):
        memory, backend = planned(random_linear(rng, weight_format, 24, 512, bias=False))
        backend.reserve(LIMITS)
        tags[weight_format] = memory.live_by_tag()
        backend.close()
        assert set(memory.live_by_tag()) == {"weights/layer"}
    arranged = set(tags[WeightFormat.NVFP4]) - set(tags[WeightFormat.BF16])
    assert arranged == {"workspace/linear.arranged"}
    assert tags[WeightFormat.NVFP4]["workspace/linear.arranged"] >= LIMITS.max_tokens * 512 * 2


def test_what_the_backend_refuses_a_plan_refuses() -> None:
    rng = np.random.default_rng(4)
    wide = LinearSource("wide", WeightFormat.FP8, (1, 1 << 21), np.broadcast_to(np.uint8(0), (1, 1 << 21)))
    with pytest.raises(CheckpointError, match="more than the CUDA backend repacks"):
        planned(wide)
    one = random_linear(rng, WeightFormat.BF16, 4, 32, bias=False)
    other = random_linear(rng, WeightFormat.BF16, 4, 48, bias=False)
    with pytest.raises(CheckpointError, match="48 columns, its neighbours have 32"):
        planned(one, other)
    _, backend = planned(one)
    with pytest.raises(ConfigurationError, match="--block-size 8"):
        backend.reserve(
            StepLimits(
                max_tokens=8,
                max_seqs=1,
                max_blocks_per_seq=1,
                max_logits_rows=1,
                vocab_size=8,
                block_size=8,
            )
        )


def test_the_gpus_are_named_as_they_are_asked_for() -> None:
    assert all(name == gpu.name and name == name.lower() for name, gpu in GPUS.items())
    assert {gpu.shape.shared_bytes for gpu in GPUS.values()} == {101_376, 166_912, 232_448}
    assert [gpu.name for gpu in GPUS.values() if gpu.shape.hopper] == ["h100", "h200"]
