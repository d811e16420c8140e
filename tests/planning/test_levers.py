"""Levers are tried: with each the load fits, with a little less of it it does not."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.settings import parse_byte_size
from engine.config import EngineConfig
from engine.devices import choose_device
from engine.levers import Lever
from engine.memory.address_space import AddressSpace
from engine.memory.errors import AllocationRequest, Why
from engine.model.checkpoint import Checkpoint
from engine.model.headers import CheckpointHeaders
from engine.planning.after_load import levers_after
from engine.planning.device import choose_planning_device
from engine.planning.levers import find_combination, plan_levers
from engine.planning.model import plan_load
from engine.planning.plan import LoadPlan, Planner
from engine.residency import Residency
from tests.checkpoints import CHECKPOINTS
from tests.memory.test_address_space import limit_of
from tests.planning.loads import MIB, TRACE, flags_of, load

MODEL = CHECKPOINTS / "llama-untied" / "NVFP4-FP8KV-ct"

TOO_LARGE: list[dict[str, Any]] = [
    {"device_memory": 9 * MIB},
    {"device_memory": 9 * MIB, "max_model_len": 1024, "kv_cache_dtype": "bfloat16"},
    {"device_memory": 16 * MIB, "kv_cache_memory": 12 * MIB},
    {"device_memory": 16 * MIB, "kv_cache_memory": 12 * MIB, "max_model_len": 512},
    {"device_memory": 64 * MIB, "gpu_memory_utilization": 0.1},
    {"device_memory": 16 * MIB, "max_num_batched_tokens": 4096, "max_num_seqs": 512},
    {"device_memory": 400_000},
]


def planner_for(config: EngineConfig) -> Planner:
    return Planner(CheckpointHeaders.open(config.model), choose_planning_device(config))


def value_of(lever: Lever) -> Any:
    field = lever.flag.removeprefix("--").replace("-", "_")
    types = EngineConfig.__annotations__
    if field in ("device_memory", "kv_cache_memory"):
        return field, parse_byte_size(lever.value)
    if field == "gpu_memory_utilization":
        return field, float(lever.value)
    return field, lever.value if "DType" in str(types[field]) else int(lever.value)


def gentler(field: str, value: Any, config: EngineConfig) -> Any:
    """A value that the flag might have had instead; None where there is none."""
    if field == "device_memory":
        return int(value * 0.98)
    if field == "kv_cache_memory":
        return int(value * 1.02)
    if field == "gpu_memory_utilization":
        return round(value - 0.01, 2)
    if field == "max_model_len":
        return value + config.block_size
    if field == "max_num_seqs":
        return value + 1
    if field == "max_num_batched_tokens":
        return value + 8
    return None


@pytest.mark.parametrize("flags", TOO_LARGE, ids=str)
def test_with_every_lever_the_load_fits_and_with_less_of_it_it_does_not(flags: dict[str, Any]) -> None:
    config = flags_of(MODEL, **flags)
    planner = planner_for(config)
    plan = planner.plan(config)
    assert not plan.fits
    assert load(config).error is not None
    levers = plan_levers(planner, config, plan)
    enough = [lever for lever in levers if lever.enough]
    assert enough
    assert levers[: len(enough)] == enough, "those that are enough come first"
    assert "--device-memory" in {lever.flag for lever in enough}
    for lever in enough:
        assert lever.verified
        assert lever.frees > 0, lever
        field, value = value_of(lever)
        changed = msgspec.structs.replace(config, **{field: value})
        assert load(changed).error is None, lever
        less = gentler(field, value, config)
        if less is not None and less != getattr(config, field):
            assert load(msgspec.structs.replace(config, **{field: less})).error is not None, (lever, less)
    for lever in levers[len(enough) :]:
        assert not lever.verified
        field, value = value_of(lever)
        assert load(msgspec.structs.replace(config, **{field: value})).error is not None, lever


ASKED = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_logits_rows")
"""flags that say what the engine can do, not what it takes"""


def changes_of(plan: LoadPlan) -> Iterator[dict[str, Any]]:
    """What the levers that are enough change, and what the combination does."""
    for lever in plan.levers:
        if lever.enough:
            yield dict([value_of(lever)])
    if plan.combination is not None:
        levers = re.findall(r"(--[a-z-]+) (\S+)", plan.combination)
        yield dict(value_of(Lever(flag=flag, value=value, frees=0, enough=True)) for flag, value in levers)


@pytest.mark.parametrize(
    "flags",
    [
        *TOO_LARGE,
        {"device_memory": 9 * MIB, "max_logits_rows": 512},
        {"device_memory": 9 * MIB, "max_logits_rows": 2048, "max_num_batched_tokens": 2048},
        {
            "device_memory": 8 * MIB,
            "max_logits_rows": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
        },
        {"device_memory": 8 * MIB, "max_logits_rows": 512, "kv_cache_memory": 8 * MIB},
        {"device_memory": 9 * MIB, "max_model_len": 1000, "kv_cache_memory": 4 * MIB, "max_num_seqs": 64},
    ],
    ids=str,
)
def test_no_lever_takes_back_what_another_flag_asked_for(flags: dict[str, Any]) -> None:
    """It may turn the flag itself."""
    config = flags_of(MODEL, **flags)
    plan = plan_load(config)
    assert not plan.fits
    asked = opened(config).limits
    changes = list(changes_of(plan))
    assert changes
    for change in changes:
        residency = opened(msgspec.structs.replace(config, **change))
        residency.fill()
        for name in ASKED:
            if name in flags and name not in change:
                assert getattr(residency.limits, name) == getattr(asked, name), (name, change)
        residency.close()


def test_rows_of_logits_have_a_lever_of_their_own() -> None:
    config = flags_of(MODEL, device_memory=11 * MIB, max_logits_rows=512)
    levers = {lever.flag: lever for lever in plan_load(config).levers}
    assert levers["--max-logits-rows"].enough
    assert 32 <= int(levers["--max-logits-rows"].value) < 512
    assert "--max-num-batched-tokens" not in levers


def test_flags_that_fit_together_where_none_does_alone() -> None:
    config = flags_of(
        MODEL, device_memory=8 * MIB, max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=2048
    )
    plan = plan_load(config)
    assert not any(lever.enough and lever.flag != "--device-memory" for lever in plan.levers)
    assert plan.combination is not None
    flags = re.findall(r"--([a-z-]+) (\S+)", plan.combination)
    assert len(flags) >= 3
    changes = {name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in flags}
    assert load(msgspec.structs.replace(config, **changes)).error is None


def test_weights_that_are_too_large_have_no_lever_but_memory(large_model: Path) -> None:
    config = EngineConfig(model=str(large_model), device="cuda")
    plan = plan_load(config, gpu="l4", gpu_memory=16 << 30)
    assert not plan.fits
    assert (plan.levers, plan.combination) == ([], None)
    assert plan.limit is not None
    assert plan.needed["weights"] > plan.limit


def test_nothing_is_tried_where_it_fits() -> None:
    plan = plan_load(flags_of(MODEL))
    assert plan.fits
    assert (plan.levers, plan.combination, plan.failure) == ([], None, None)


# -- after a real failure ----------------------------------------------------------------------------------


def opened(config: EngineConfig) -> Residency:
    residency = Residency(config, choose_device(config, {}), Checkpoint.open(config.model), trace=TRACE)
    residency.open_house()
    return residency


def test_a_failure_that_was_to_be_expected_gets_planned_levers() -> None:
    config = flags_of(MODEL, device_memory=9 * MIB)
    error = load(config).error
    assert error is not None
    levers = levers_after(opened(config), error.request)
    assert levers == plan_load(config).levers
    assert all(lever.verified for lever in levers if lever.enough)


@pytest.mark.parametrize("flags", [{"kv_cache_memory": 400 * MIB}, {}], ids=str)
def test_what_the_system_does_not_map_gets_levers_that_take_less_of_it(flags: dict[str, Any]) -> None:
    """Really: with a limit on address space that the KV cache does not go under."""
    config = flags_of(MODEL, device_memory=4096 * MIB, max_num_seqs=4096, **flags)
    assert load(config).error is None
    room = AddressSpace.read().mapped + 150 * MIB
    with limit_of(room):
        error = load(config).error
        assert error is not None
        request = error.request
        assert request.why is Why.ADDRESS_SPACE
        assert request.tag.startswith("kv/")
        residency = opened(config)
        # As when it failed: what had been loaded is there still.
        lost = mmap.mmap(-1, request.live or 1)
        levers = levers_after(residency, request)
        lost.close()
        residency.close()
        assert levers[0].flag == "ulimit -v"
        assert all(lever.verified for lever in levers if lever.enough)
        enough = {lever.flag: lever for lever in levers if lever.enough}
        assert "--kv-cache-memory" in enough
        assert not {"--device-memory", "--gpu-memory-utilization"} & {lever.flag for lever in levers}
        for lever in enough.values():
            if lever.flag != "ulimit -v":
                field, value = value_of(lever)
                assert load(msgspec.structs.replace(config, **{field: value})).error is None, lever
                assert lever.frees > 0
    with limit_of(int(levers[0].value) << 10):
        assert load(config).error is None


def test_a_failure_that_no_plan_knows_of_gets_estimates() -> None:
    """Nothing of what the engine asks for makes a device of this size too small."""
    config = flags_of(MODEL, device_memory=64 * MIB)
    residency = opened(config)
    resident = residency.fill()
    request = AllocationRequest(size=MIB, tag="workspace/scratch", why=Why.FULL, free=0, live=60 * MIB)
    levers = levers_after(residency, request)
    assert levers == residency.estimate_levers(request)
    assert levers
    assert not any(lever.verified for lever in levers)
    del resident
    residency.close()


def test_the_plans_figures_are_consistent() -> None:
    config = flags_of(MODEL)
    plan = plan_load(config)
    ledger = plan.ledger
    assert ledger["total"] == plan.capacity == ledger["free"] + sum(ledger["segments"].values())
    assert plan.resident == sum(plan.needed.values()) == sum(plan.tags.values())
    cache = plan.kv_cache
    assert cache is not None
    assert cache.tokens == cache.num_blocks * 16
    assert cache.sequences_at(1) == cache.sequences_at(16) == cache.num_blocks
    assert cache.sequences_at(17) == cache.num_blocks // 2
    assert plan.peak is not None
    assert plan.load_peak is not None
    assert plan.peak.bytes == plan.resident, "the CPU repacks nothing beside itself"
    assert plan.load_peak.bytes == plan.needed["weights"]
    assert planner_for(config).need(config) < plan.resident, "the smallest cache is smaller"


def test_combinations_keep_a_cache_that_was_asked_for() -> None:
    config = flags_of(MODEL, device_memory=12 * MIB, kv_cache_memory=8 * MIB, max_num_batched_tokens=2048)
    planner = planner_for(config)
    found = find_combination(planner, config, planner.plan(config))
    assert found is not None
    assert "--kv-cache-memory" in found
    assert "--max-model-len" not in found
