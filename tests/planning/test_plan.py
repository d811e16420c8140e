"""Plans against loads: what is planned is what happens, request for request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.devices import choose_device
from engine.errors import CheckpointError
from engine.memory.adaptors import LimitingMemoryResource
from engine.memory.errors import AllocationError
from engine.memory.settings import TraceSettings
from engine.model.checkpoint import Checkpoint
from engine.model.headers import CheckpointHeaders
from engine.planning.device import choose_planning_device
from engine.planning.plan import Planner
from engine.residency import Residency
from tests.checkpoints import CHECKPOINTS
from tests.model.checkpoint_files import bfloat16, dense, fp8_linear, modelopt_nvfp4, write_model
from tests.planning.loads import MIB, TRACE, Run, flags_of, load

EVERY = sorted(str(path.parent.relative_to(CHECKPOINTS)) for path in CHECKPOINTS.glob("*/*/config.json"))


def both(model: Path | str, **flags: Any) -> tuple[Run, Run]:
    """The real load and the planned one."""
    config = flags_of(model, **flags)
    real = load(config)
    planned = Run(config, choose_planning_device(config), CheckpointHeaders.open(model))
    return real, planned


@pytest.mark.parametrize("name", EVERY)
def test_every_request_of_a_load_is_planned(name: str) -> None:
    real, planned = both(CHECKPOINTS / name)
    assert real.error is None
    assert len(real.requests) > 30
    assert planned.requests == real.requests
    assert planned.live == real.live
    assert (planned.ledger.free, planned.ledger.total) == (real.ledger.free, real.ledger.total)


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_cache_memory": 100_000},
        {"kv_cache_dtype": "bfloat16", "threads": 1},
        {"kv_cache_dtype": "fp8", "max_num_seqs": 3, "max_model_len": 100},
        {"gpu_memory_utilization": 0.05, "max_num_batched_tokens": 64, "block_size": 8},
        {"max_logits_rows": 300, "max_num_batched_tokens": 300},
    ],
)
def test_under_any_flags(flags: dict[str, Any]) -> None:
    real, planned = both(CHECKPOINTS / "llama-tied" / "NVFP4-modelopt", **flags)
    assert real.error is None
    assert planned.requests == real.requests
    assert planned.blocks == real.blocks


@pytest.mark.parametrize("capacity", [50_000, 400_000, 2_000_000, 9 * MIB])
def test_the_request_that_fails_is_planned(capacity: int) -> None:
    model = CHECKPOINTS / "llama-untied" / "NVFP4-FP8KV-ct"
    real, planned = both(model, device_memory=capacity)
    assert real.error is not None
    assert planned.error is not None
    assert planned.requests == real.requests
    assert replace(planned.error.request, api="host") == real.error.request


@pytest.mark.parametrize("linear", [dense, modelopt_nvfp4, fp8_linear], ids=["bf16", "nvfp4", "fp8"])
def test_a_head_that_repeats_the_table_is_not_planned_twice(tmp_path: Path, linear: Any) -> None:
    """Which of the two it is, only the contents tell."""
    make = linear
    table = bfloat16(np.random.default_rng(7).normal(0, 0.05, (64, 32)))
    other = bfloat16(np.random.default_rng(8).normal(0, 0.05, (64, 32)))
    sizes = []
    for name, head in (("same", table), ("other", other)):
        model = write_model(tmp_path / name, linear=lambda module: make, more={"lm_head.weight": head})
        real, planned = both(model)
        assert planned.requests == real.requests
        sizes.append(sum(planned.live.values()) - sum(s for t, s in planned.live.items() if t[:3] == "kv/"))
    assert sizes[1] - sizes[0] == 64 * 32 * 2


def test_what_is_wrong_with_the_headers_is_said_as_by_the_load(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"intermediate_size": 64})
    config = EngineConfig(model=str(model), device="cpu", device_memory=64 * MIB)
    messages = []
    for device, kind in (
        (choose_device(config, {}), Checkpoint),
        (choose_planning_device(config), CheckpointHeaders),
    ):
        residency = Residency(config, device, kind.open(model), trace=TraceSettings())
        residency.open_house()
        with pytest.raises(CheckpointError) as caught:
            residency.fill()
        messages.append(str(caught.value))
        residency.close()
    assert messages[0] == messages[1]
    assert "expected shape" in messages[0]


# -- a GPU that is not here --------------------------------------------------------------------------------


def test_a_gpus_figures_are_those_that_were_measured_on_one(large_model: Path) -> None:
    """`benchmarks/gpu_reference_run.py` loaded this model on an H200: every byte of it is planned."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_reference_run.json"
    measured = json.loads(results.read_text())["malloc"]["24 GiB"]
    ledger = measured["ledgers"]["after load"]
    total = sum(size for size in ledger.values())
    config = EngineConfig(model=str(large_model), device="cuda", kv_cache_memory=10**9)
    device = choose_planning_device(config, gpu="h200", gpu_memory=total)
    plan = Planner(CheckpointHeaders.open(large_model), device).plan(config)
    assert plan.fits
    assert plan.kv_cache is not None
    assert plan.kv_cache.bytes == measured["kv_cache"]["bytes"]
    assert plan.needed == {name: ledger[name] for name in ("weights", "kv", "workspace", "io")}
    assert plan.peak is not None
    assert plan.peak.bytes == measured["peak"]
    assert plan.load_peak is not None
    assert plan.load_peak.over_resident <= measured["load"]["peak_over_resident"] == 16 * MIB
    # The driver's steps are a model of the driver, not of us.
    assert abs(plan.ledger["rounding"] - ledger["rounding"]) < 2 * MIB
    assert abs(plan.ledger["context"] - ledger["context"] - ledger["library"]) < 4 * MIB


def test_the_request_that_failed_on_a_gpu_is_planned(large_model: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_reference_run.json"
    measured = json.loads(results.read_text())["malloc"]["16 GiB"]
    config = EngineConfig(model=str(large_model), device="cuda", kv_cache_memory=10**9)
    device = choose_planning_device(config, gpu="h200", gpu_memory=1 << 40)
    residency = Residency(
        config,
        device,
        CheckpointHeaders.open(large_model),
        trace=TRACE,
        memory=LimitingMemoryResource(device.open_memory(), measured["limit"]),
    )
    residency.open_house()
    with pytest.raises(AllocationError) as caught:
        residency.fill()
    planned, known = caught.value.request, measured["allocation"]
    caught.value.__traceback__ = None
    residency.close()
    assert (planned.sequence, planned.size, planned.tag) == (known["sequence"], known["size"], known["tag"])
    assert (planned.live, planned.error) == (known["live"], known["error"])


@pytest.mark.parametrize("share", [0.9, 0.98, 1.0])
def test_a_whole_gpu_can_be_filled(share: float) -> None:
    """What the driver's steps add to each request is left free, so that the last ones fit."""
    name = CHECKPOINTS / "qwen2" / "NVFP4-modelopt"
    config = EngineConfig(model=str(name), gpu_memory_utilization=share, max_num_seqs=4096, device="cuda")
    device = choose_planning_device(config, gpu="rtx-4090", gpu_memory=1 << 30)
    plan = Planner(CheckpointHeaders.open(name), device).plan(config)
    assert plan.fits, plan.failure
    assert plan.kv_cache is not None
    assert plan.resident > 0.4 * share * (1 << 30)
