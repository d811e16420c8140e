from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from app.settings import parse_byte_size
from engine.backend.protocol import DType
from engine.config import EngineConfig, EngineLimits
from engine.levers import (
    Lever,
    MemoryDemand,
    describe_levers,
    find_levers,
    format_size,
    more_address_space,
)
from engine.memory.address_space import AddressSpace
from engine.memory.errors import AllocationRequest, Why
from tests.engine.fakes import limits_of

MIB = 1 << 20


def workspace(limits: EngineLimits) -> int:
    return limits.max_num_batched_tokens * 4096 + limits.max_logits_rows * 200_000


def demand(*, total: int, limit: int | None = None, kv_blocks: int = 100, **flags: Any) -> MemoryDemand:
    kv_dtype = flags.pop("kv_dtype", DType.FLOAT8_E4M3)
    return MemoryDemand(
        config=EngineConfig(model="m", **flags),
        limits=limits_of(max_num_seqs=32, max_model_len=800, max_num_batched_tokens=2048, block_size=16),
        device="cpu",
        total=total,
        limit=limit,
        weights=100 * MIB,
        scratch=4 * MIB,
        workspace=workspace,
        kv_block=MIB,
        kv_blocks=kv_blocks,
        kv_dtype=kv_dtype,
    )


def by_flag(levers: list[Lever]) -> dict[str, Lever]:
    found = {lever.flag: lever for lever in levers}
    assert len(found) == len(levers)
    return found


def test_a_full_device_during_the_load() -> None:
    # 100 MiB of weights, 14 of workspace and 100 of KV on a device of 150.
    what = demand(total=150 * MIB, kv_cache_memory=100 * MIB)
    request = AllocationRequest(size=6 * MIB, free=3 * MIB, live=147 * MIB, why=Why.FULL)
    levers = by_flag(find_levers(request, what))
    kv = levers["--kv-cache-memory"]
    assert kv.enough
    assert parse_byte_size(kv.value) + 100 * MIB + workspace(what.limits) + 4 * MIB <= 150 * MIB
    assert parse_byte_size(kv.value) > 20 * MIB, "and not much less than that"
    assert kv.frees == 100 * MIB - parse_byte_size(kv.value) // MIB * MIB
    device = levers["--device-memory"]
    assert device.enough
    assert what.resident < parse_byte_size(device.value) < 1.1 * what.resident
    assert device.frees == parse_byte_size(device.value) - 150 * MIB
    assert "--gpu-memory-utilization" not in levers, "nothing caps the device"


def test_a_cap_is_raised_as_far_as_the_device_goes() -> None:
    what = demand(total=300 * MIB, limit=200 * MIB, gpu_memory_utilization=2 / 3, max_model_len=800)
    request = AllocationRequest(size=MIB, free=100 * MIB, live=200 * MIB, why=Why.CAP)
    levers = by_flag(find_levers(request, what))
    share = levers["--gpu-memory-utilization"]
    assert share.enough
    assert what.resident < float(share.value) * 300 * MIB < 300 * MIB
    assert share.frees == int(float(share.value) * 300 * MIB) - 200 * MIB
    length = levers["--max-model-len"]
    assert length.enough
    assert 0 < int(length.value) < 800
    assert int(length.value) % 16 == 0
    assert length.frees == (100 - math.ceil(int(length.value) / 16)) * MIB


def test_the_cap_of_a_resource_that_was_handed_in_is_what_there_is() -> None:
    """The device has far more free, but that is no use."""
    what = demand(total=200 * MIB, kv_cache_memory=100 * MIB)
    request = AllocationRequest(size=6 * MIB, free=10**11, live=198 * MIB, why=Why.CAP)
    kv = by_flag(find_levers(request, what))["--kv-cache-memory"]
    assert kv.enough
    assert what.resident - kv.frees + 4 * MIB <= 200 * MIB


def test_what_the_system_does_not_map_is_no_matter_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has the bytes: more of it, or a larger share of it, changes nothing."""
    what = demand(total=300 * MIB, limit=270 * MIB, kv_cache_memory=100 * MIB)
    request = AllocationRequest(
        size=20 * MIB, free=170 * MIB, live=130 * MIB, why=Why.ADDRESS_SPACE, error="cannot allocate memory"
    )
    space = AddressSpace(limit=500 * MIB, mapped=490 * MIB, overcommit=0, uncommitted=None, largest=None)
    monkeypatch.setattr(AddressSpace, "read", lambda: space)
    levers = by_flag(find_levers(request, what))
    assert not {"--device-memory", "--gpu-memory-utilization"} & levers.keys()
    system = levers["ulimit -v"]
    assert system.enough
    assert int(system.value) * 1024 >= 500 * MIB + what.resident - 140 * MIB
    kv = levers["--kv-cache-memory"]
    assert kv.enough
    assert what.resident - kv.frees <= 140 * MIB


@pytest.mark.parametrize(
    ("limit", "overcommit", "line"),
    [
        (500 * MIB, 0, "ulimit -v 1050624"),
        (None, 0, "sysctl -w vm.overcommit_memory=1"),
        (None, 2, "sysctl -w vm.overcommit_memory=0"),
        (1 << 40, 2, "sysctl -w vm.overcommit_memory=0"),
        (None, 1, ""),
    ],
)
def test_the_system_is_told_to_map_more(limit: int | None, overcommit: int, line: str) -> None:
    space = AddressSpace(limit=limit, mapped=490 * MIB, overcommit=overcommit, uncommitted=None, largest=None)
    assert ", ".join(map(str, more_address_space(space, 14 * MIB))) == line


def test_scratch_is_given_back_before_the_rest_comes() -> None:
    what = demand(total=240 * MIB, kv_cache_memory=100 * MIB)
    large = dataclasses.replace(what, scratch=90 * MIB)
    request = AllocationRequest(size=MIB, free=0, live=240 * MIB)
    assert find_levers(request, large) == find_levers(request, what)


def test_a_wide_cache_can_be_made_narrow() -> None:
    request = AllocationRequest(size=MIB, free=0, live=290 * MIB)
    levers = by_flag(find_levers(request, demand(total=290 * MIB, kv_blocks=180, kv_dtype=DType.BFLOAT16)))
    assert levers["--kv-cache-dtype"] == Lever(
        flag="--kv-cache-dtype", value="fp8", frees=90 * MIB, enough=True
    )
    assert "--kv-cache-dtype" not in by_flag(find_levers(request, demand(total=290 * MIB)))


def test_smaller_steps_are_the_gentlest_that_do() -> None:
    # What lacks is 1 MiB of a step's buffers, long after the load.
    what = demand(total=400 * MIB)
    request = AllocationRequest(size=MIB, free=0, live=400 * MIB, tag="workspace/scratch")
    levers = by_flag(find_levers(request, what))
    assert levers["--max-num-batched-tokens"].value == "1024"
    assert levers["--max-num-batched-tokens"].frees == 1024 * 4096
    assert levers["--max-num-seqs"].value == "16"
    assert levers["--max-num-seqs"].frees == 16 * 200_000


def test_rows_that_were_asked_for_are_not_taken_back_by_fewer_tokens() -> None:
    what = demand(total=400 * MIB, max_logits_rows=512)
    limits = msgspec.structs.replace(what.limits, max_logits_rows=512)
    request = AllocationRequest(size=MIB, free=0, live=400 * MIB, tag="workspace/scratch")
    levers = by_flag(find_levers(request, dataclasses.replace(what, limits=limits)))
    assert int(levers["--max-num-batched-tokens"].value) >= 512
    assert levers["--max-logits-rows"] == Lever(
        flag="--max-logits-rows", value="256", frees=256 * 200_000, enough=True
    )


def test_levers_that_are_enough_come_first_and_others_say_that_they_are_not() -> None:
    request = AllocationRequest(size=60 * MIB, free=0, live=150 * MIB)
    levers = find_levers(request, demand(total=150 * MIB))
    assert [lever.enough for lever in levers] == sorted((lever.enough for lever in levers), reverse=True)
    assert not by_flag(levers)["--max-num-seqs"].enough
    assert by_flag(levers)["--max-num-seqs"].value == "1"
    assert describe_levers(levers).startswith("to make it fit: --device-memory ")
    assert "--max-num-seqs" not in describe_levers(levers)
    some = [Lever(flag="--max-num-seqs", value="1", frees=5, enough=False)]
    assert describe_levers(some) == "no flag alone makes it fit; these help: --max-num-seqs 1"
    assert describe_levers([]) == "no flag makes it fit"


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 368_640, 10**6, 10**9, 2**31 - 1, 10**11, 2**40])
def test_sizes_are_read_back_as_they_are_meant(count: int) -> None:
    for up in (True, False):
        size, text = format_size(count, up=up)
        assert parse_byte_size(text) == size
        assert (size >= count) if up else (size <= count)
        assert abs(size - count) <= 0.01 * count
