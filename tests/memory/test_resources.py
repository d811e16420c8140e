from __future__ import annotations

import gc
import itertools
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cuda.core import Buffer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.base import DeviceGauge, MemoryDeallocationWarning
from engine.memory.errors import OutOfMemoryError, UnknownPointerError, Why
from engine.memory.resources import HostMemoryResource, PlanningMemoryResource, host_capacity
from engine.memory.scope import memory_scope, request_scope

MIB = 1 << 20
GIB = 1 << 30


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


# -- the host ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * MIB), max_size=20))
def test_blocks_are_aligned_disjoint_and_writable(sizes: list[int]) -> None:
    resource = HostMemoryResource(64 * MIB)
    buffers = [resource.allocate(size) for size in sizes]
    assert resource.live == sum(sizes)
    spans = sorted((int(buffer.handle), buffer.size) for buffer in buffers)
    for (address, size), (following, _) in itertools.pairwise(spans):
        assert address + max(size, 1) <= following
    for number, (buffer, size) in enumerate(zip(buffers, sizes, strict=True)):
        assert int(buffer.handle) % 64 == 0
        assert buffer.size == size
        np.from_dlpack(buffer).view(np.uint8)[:] = number
    for number, buffer in enumerate(buffers):
        assert (np.from_dlpack(buffer).view(np.uint8) == number).all()
    for buffer in buffers:
        buffer.close()
    assert resource.live == 0
    assert resource.read_free() == 64 * MIB


def test_large_blocks_start_at_a_huge_page() -> None:
    buffer = HostMemoryResource(GIB).allocate(8 * MIB + 1)
    assert int(buffer.handle) % (2 * MIB) == 0


@pytest.mark.parametrize("tag", ["weights/a", "kv", "workspace"])
def test_the_last_byte_of_a_large_block_is_there(tag: str) -> None:
    with memory_scope(tag):
        buffer = HostMemoryResource(GIB).allocate(9 * MIB + 5)
    view = np.from_dlpack(buffer)
    view[[0, -1]] = 1
    assert view.sum() == 2


def test_memory_costs_nothing_until_it_is_written() -> None:
    resource = HostMemoryResource(8 * GIB)
    before = resident_bytes()
    with memory_scope("kv"):
        buffer = resource.allocate(GIB)
    view = np.from_dlpack(buffer)
    view[: 4 * MIB] = 1
    grown = resident_bytes() - before
    assert 4 * MIB - MIB <= grown < 32 * MIB


def test_a_large_block_goes_back_to_the_system() -> None:
    resource = HostMemoryResource(GIB)
    before = resident_bytes()
    buffer = resource.allocate(128 * MIB)
    np.from_dlpack(buffer)[:] = 1
    assert resident_bytes() - before > 100 * MIB
    buffer.close()
    assert resident_bytes() - before < 64 * MIB


def test_the_capacity_is_exact() -> None:
    resource = HostMemoryResource(1000)
    first = resource.allocate(999)
    second = resource.allocate(1)
    with memory_scope("kv"), request_scope(["r1"]), pytest.raises(OutOfMemoryError) as caught:
        resource.allocate(1)
    request = caught.value.request
    assert (request.why, request.size, request.free, request.live) == (Why.FULL, 1, 0, 1000)
    assert (request.tag, request.requests, request.api) == ("kv", ("r1",), "host")
    assert request.sequence is None
    first.close()
    third = resource.allocate(999)
    assert resource.read_free() == 0
    second.close()
    third.close()
    assert (resource.live, resource.read_free()) == (0, 1000)


def test_nothing_at_all_has_an_address_and_costs_nothing() -> None:
    resource = HostMemoryResource(0)
    first, second = resource.allocate(0), resource.allocate(0)
    assert first.handle
    assert first.handle != second.handle
    assert np.from_dlpack(first).shape == (0,)
    first.close()
    second.close()
    assert resource.live == 0


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_a_size_that_is_none_asks_for_nothing(size: object, error: type[Exception]) -> None:
    resource = HostMemoryResource(1000)
    with pytest.raises(error):
        resource.allocate(size)  # type: ignore[arg-type]
    assert resource.live == 0


def test_numpy_integers_are_sizes() -> None:
    assert HostMemoryResource(1000).allocate(np.int64(10)).size == 10


def test_a_free_that_makes_no_sense_warns_and_changes_nothing() -> None:
    resource = HostMemoryResource(1000)
    buffer = resource.allocate(100)
    pointer = int(buffer.handle)
    with pytest.warns(MemoryDeallocationWarning, match="100 bytes are allocated there"):
        resource.deallocate(pointer, 99)
    with pytest.warns(MemoryDeallocationWarning, match="not allocated here, or already freed"):
        resource.deallocate(pointer + 1, 100)
    assert resource.live == 100
    buffer.close()
    with pytest.warns(MemoryDeallocationWarning, match="already freed"):
        resource.deallocate(pointer, 100)
    with pytest.raises(UnknownPointerError):
        resource.release(pointer, 100, None)
    assert (resource.live, resource.read_free()) == (0, 1000)


def test_a_view_keeps_its_bytes_when_the_buffer_is_dropped() -> None:
    resource = HostMemoryResource(MIB)
    buffer = resource.allocate(1000)
    view = np.from_dlpack(buffer)
    view[:] = 7
    del buffer
    gc.collect()
    assert resource.live == 1000
    assert (view == 7).all()
    del view
    gc.collect()
    assert resource.live == 0


def test_the_system_may_refuse_what_the_capacity_allows() -> None:
    program = """
import resource
from engine.memory.errors import OutOfMemoryError
from engine.memory.resources import HostMemoryResource
limit = 4 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
host = HostMemoryResource(1 << 40)
try:
    host.allocate(64 << 30)
except OutOfMemoryError as error:
    request = error.request
    print(request.why.value, request.error, request.error_code, host.live, request.live, request.free >> 40)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["address-space", "cannot", "allocate", "memory", "12", "0", "0", "1"]


def test_a_plan_knows_what_the_system_would_not_map() -> None:
    planned = PlanningMemoryResource(GIB, mappable=3 * MIB)
    first = planned.allocate(2 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        planned.allocate(2 * MIB)
    request = caught.value.request
    assert (request.why, request.live, request.free) == (Why.ADDRESS_SPACE, 2 * MIB, GIB - 2 * MIB)
    second = planned.allocate(MIB)
    first.close()
    second.close()
    assert (planned.live, planned.read_free()) == (0, GIB)


def test_threads_never_pass_the_capacity_together() -> None:
    resource = HostMemoryResource(50 * 1000)
    refused: list[int] = []
    held: list[Buffer] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(200):
            try:
                held.append(resource.allocate(1000))
            except OutOfMemoryError:
                refused.append(1)
                if held:
                    held.pop().close()
            assert 0 <= resource.live <= 50 * 1000

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    assert resource.live == len(held) * 1000
    while held:
        held.pop().close()
    assert (resource.live, resource.read_free()) == (0, 50 * 1000)


def test_the_capacity_of_this_host_is_no_more_than_it_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < host_capacity() <= total


# -- planning ----------------------------------------------------------------------------------------------


def test_a_plan_needs_no_memory() -> None:
    resource = PlanningMemoryResource(1 << 50, 2 * MIB)
    before = resident_bytes()
    buffers = [resource.allocate(1 << 40) for _ in range(100)]
    assert resident_bytes() - before < 8 * MIB
    assert resource.live == 100 << 40
    assert not buffers[0].is_host_accessible
    assert not buffers[0].is_device_accessible


@given(st.integers(1, 4096), st.lists(st.integers(0, 10_000), max_size=30))
def test_planned_addresses_never_overlap_and_take_whole_steps(granularity: int, sizes: list[int]) -> None:
    resource = PlanningMemoryResource(1 << 40, granularity)
    spans: list[tuple[int, int]] = []
    for size in sizes:
        buffer = resource.allocate(size)
        spans.append((int(buffer.handle), int(buffer.handle) + max(size, 1)))
        taken = resource.total - resource.read_free()
        assert taken == -(-size // granularity) * granularity
        assert resource.overheads().rounding == taken - size
        buffer.close()  # and still the address is not given out again
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert resource.read_free() == resource.total


def test_a_plan_fails_where_the_device_would() -> None:
    resource = PlanningMemoryResource(4 * MIB, 2 * MIB)
    held = [resource.allocate(1), resource.allocate(2 * MIB)]
    with pytest.raises(OutOfMemoryError) as caught:
        resource.allocate(1)
    assert (caught.value.api, caught.value.why, caught.value.live) == ("plan", Why.FULL, 2 * MIB + 1)
    assert len(held) == 2


@pytest.mark.parametrize("resource", [HostMemoryResource(1), PlanningMemoryResource(1)])
def test_both_are_gauges(resource: HostMemoryResource) -> None:
    assert isinstance(resource, DeviceGauge)
    assert resource.read_pool() is None
    assert resource.last_retries() == 0


def test_impossible_devices() -> None:
    with pytest.raises(ValueError, match="capacity of -1"):
        HostMemoryResource(-1)
    with pytest.raises(ValueError, match="granularity of 0"):
        PlanningMemoryResource(1, 0)
    with pytest.raises(ValueError, match="2 bytes cannot be taken of a capacity of 1"):
        PlanningMemoryResource(1, taken=2)


def test_small_requests_share_a_plans_steps() -> None:
    resource = PlanningMemoryResource(16 * MIB, 2 * MIB, shared_below=MIB)
    held = [resource.allocate(1000), resource.allocate(MIB - 1), resource.allocate(MIB)]
    assert resource.total - resource.read_free() == 1024 + MIB + 2 * MIB
    assert resource.overheads().rounding == 24 + 1 + MIB
    del held


def test_what_is_taken_beforehand_is_nobodys_request() -> None:
    resource = PlanningMemoryResource(10_000, taken=4_000, device="cuda")
    assert (resource.device, resource.read_free(), resource.live) == ("cuda", 6_000, 0)
    buffer = resource.allocate(6_000)
    overheads = resource.overheads()
    assert (overheads.context, overheads.rounding, resource.read_free()) == (4_000, 0, 0)
    with pytest.raises(OutOfMemoryError):
        resource.allocate(1)
    buffer.close()
    assert resource.read_free() == 6_000
