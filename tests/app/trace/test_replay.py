"""A replay over the allocator that made a trace finds what happened; over another, what would have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.trace.allocators import ALLOCATORS, MallocAllocator, PoolAllocator, SimulatedAllocator, SlabAllocator
from app.trace.replay import replay
from engine.memory.errors import OutOfMemoryError, Why
from tests.app.trace.allocators.simulated_resource import SimulatedResource, table_of_house, traced
from tests.app.trace.making import MIB, TraceMaker, table_of, table_of_events, traces

KINDS = pytest.mark.parametrize("kind", ALLOCATORS.values(), ids=list(ALLOCATORS))
ENDLESS = 1 << 60
STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5000) | st.integers(0, 40 * MIB), st.integers(0, 1000)),
    max_size=50,
)


@KINDS
@given(steps=STEPS, capacity=st.integers(0, 200 * MIB), granularity=st.sampled_from([None, 512, MIB]))
def test_the_allocator_that_made_a_trace_has_the_same_peaks(
    kind: type[SimulatedAllocator], steps: list[tuple[bool, int, int]], capacity: int, granularity: int | None
) -> None:
    resource = SimulatedResource(kind(capacity, granularity))
    house = traced(resource)
    buffers = []
    failures = 0
    for is_free, size, which in steps:
        if is_free and buffers:
            buffers.pop(which % len(buffers)).close()
            continue
        try:
            buffers.append(house.resource.allocate(size))
        except OutOfMemoryError:
            failures += 1
    made = resource.allocator
    found = replay(table_of_house(house), kind(capacity, granularity))
    assert found.live_peak.requested == resource.peak_requested
    assert found.reserved_peak.reserved == resource.peak_reserved
    assert (found.end.requested, found.end.used, found.end.reserved) == (
        made.requested,
        made.used,
        made.reserved,
    )
    assert (found.failures, found.failed_in_trace, found.fit_here) == (0, failures, 0)
    for buffer in buffers:
        buffer.close()
    house.close()


@KINDS
@given(events=traces())
def test_without_a_limit_all_that_succeeded_succeeds(
    kind: type[SimulatedAllocator], events: list[object]
) -> None:
    table = table_of_events(events)  # type: ignore[arg-type]
    found = replay(table, kind(ENDLESS))
    assert found.failures == 0
    assert found.fit_here == found.failed_in_trace
    assert found.before == 0
    assert found.live_peak.requested >= max((int(live) for live in table.live), default=0)
    assert found.end.requested == (int(table.live[-1]) if len(table) else 0)


def test_a_load_that_failed_would_fit_elsewhere(loaded: SimpleNamespace) -> None:
    table = table_of(loaded.path)
    found = replay(table, MallocAllocator(240 * MIB))
    assert (found.requests, found.frees, found.failures) == (6, 2, 0)
    assert (found.failed_in_trace, found.fit_here) == (1, 1)
    # With the request that failed, which is given back: the trace goes on without it.
    assert (found.live_peak.requested, found.live_peak.sequence) == (234 * MIB, 6)
    assert found.end.requested == loaded.live
    assert (found.reserved_peak.rounding, found.reserved_peak.unused) == (0, 0)


def test_first_failure(loaded: SimpleNamespace) -> None:
    found = replay(table_of(loaded.path), MallocAllocator(141 * MIB))
    assert found.failures == 3
    failure = found.first_failure
    assert failure is not None
    assert (failure.sequence, failure.size, failure.tag) == (3, 50 * MIB, "repack/model.layers.0.mlp")
    assert failure.site.startswith("tests/app/trace/making.py:")
    assert (failure.why, failure.free, failure.largest) == (Why.FULL, 11 * MIB, 10 * MIB)
    # Its free is left out with it, and what fits goes on.
    assert (found.end.requested, found.frees) == (130 * MIB, 2)


def test_fragmentation_is_told_from_a_full_device(make_trace: Callable[..., TraceMaker]) -> None:
    maker = make_trace()
    for name in "abcd":
        maker.allocate(name, 24 * MIB)
    maker.free("a", "c")
    maker.allocate("e", 40 * MIB)
    table = table_of(maker.close())
    pool = replay(table, PoolAllocator(100 * MIB)).first_failure
    assert pool is not None
    assert (pool.sequence, pool.why, pool.free, pool.largest) == (5, Why.FRAGMENTATION, 52 * MIB, 24 * MIB)
    assert replay(table, MallocAllocator(100 * MIB)).failures == 0


def test_blocks_that_are_older_than_the_trace_come_first(make_trace: Callable[..., TraceMaker]) -> None:
    maker = make_trace(records=64)
    maker.allocate("old", 8 * MIB)
    maker.allocate("kept", 6 * MIB)
    for number in range(40):
        maker.allocate(str(number), 2 * MIB)
        maker.free(str(number))
    maker.free("old")
    table = table_of(maker.close())
    found = replay(table, MallocAllocator(ENDLESS))
    peak = found.reserved_peak
    assert (found.before, peak.reserved, peak.sequence) == (16 * MIB, 16 * MIB, 0)
    assert found.end.requested == 6 * MIB
    short = replay(table, MallocAllocator(11 * MIB))
    assert short.first_failure is not None
    assert (short.first_failure.sequence, short.first_failure.size) == (0, 6 * MIB)


def test_the_peak_is_shown_where_most_of_it_is_used(make_trace: Callable[..., TraceMaker]) -> None:
    """A pool has its first step from the first request on: what matters is how full it gets."""
    maker = make_trace()
    for name in "abc":
        maker.allocate(name, 10 * MIB)
    maker.free("a", "b")
    peak = replay(table_of(maker.close()), PoolAllocator(ENDLESS)).reserved_peak
    assert (peak.sequence, peak.requested, peak.reserved, peak.unused) == (3, 30 * MIB, 32 * MIB, 2 * MIB)


def test_small_tensors_in_slabs(make_trace: Callable[..., TraceMaker]) -> None:
    maker = make_trace()
    for number in range(200):
        maker.allocate(f"a{number}", 20 << 10)
        maker.allocate(f"b{number}", 700 << 10)
    maker.free(*[f"a{number}" for number in range(200)])
    for number in range(4):
        maker.allocate(f"c{number}", 900 << 10)
    table = table_of(maker.close())
    slab, malloc = replay(table, SlabAllocator(ENDLESS)), replay(table, MallocAllocator(ENDLESS))
    assert slab.live_peak.requested == malloc.live_peak.requested
    # Slabs round more and leave fewer holes.
    assert slab.reserved_peak.rounding > malloc.reserved_peak.rounding
    assert slab.end.unused < malloc.end.unused


def test_as_json(loaded: SimpleNamespace) -> None:
    facts = replay(table_of(loaded.path), MallocAllocator(141 * MIB)).to_dict()
    assert facts["first_failure"]["why"] == "full"
    peak = facts["reserved_peak"]
    assert peak["reserved"] == peak["requested"] + peak["rounding"] + peak["unused"]
    assert peak["fragmentation"] == peak["unused"] / peak["reserved"]
