"""Whatever is asked of them, simulated allocators keep their books, and never give a byte out twice."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.trace.allocators import ALLOCATORS, PoolAllocator, SimulatedAllocator, SlabAllocator
from app.trace.allocators.slab import size_class
from engine.memory.errors import OutOfMemoryError, UnknownPointerError, Why

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KINDS = pytest.mark.parametrize("kind", ALLOCATORS.values(), ids=list(ALLOCATORS))
SIZES = st.integers(0, 3000) | st.integers(0, 4 * MIB) | st.integers(0, 80 * MIB)
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1 << 30)), max_size=60)


GRANULARITIES = st.sampled_from([None, 512, 64 * KIB, 8 * MIB])


class Watched:
    """An allocator whose blocks are kept track of beside it."""

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self.allocator = allocator
        self.blocks: list[tuple[int, int]] = []
        """address and size of each that has bytes, sorted"""

    def step(self, is_free: bool, size: int, which: int) -> None:
        allocator = self.allocator
        if is_free and self.blocks:
            address, _ = self.blocks.pop(which % len(self.blocks))
            allocator.free(address)
            return
        before = (allocator.requested, allocator.used, allocator.reserved)
        try:
            address = allocator.allocate(size)
        except OutOfMemoryError as error:
            why = error.why
            address = -1
        if address < 0:
            assert (allocator.requested, allocator.used, allocator.reserved) == before
            assert size > allocator.largest_free
            assert why is (Why.FULL if size > allocator.free_bytes else Why.FRAGMENTATION)
            return
        if size == 0:
            allocator.free(address)
            return
        assert address % 512 == 0
        place = bisect_left(self.blocks, (address, 0))
        if place:
            other, length = self.blocks[place - 1]
            assert other + length <= address
        if place < len(self.blocks):
            assert address + size <= self.blocks[place][0]
        insort(self.blocks, (address, size))

    def check(self) -> None:
        allocator = self.allocator
        assert allocator.requested == sum(size for _, size in self.blocks)
        assert allocator.requested <= allocator.used <= allocator.reserved <= allocator.capacity
        assert allocator.reserved % allocator.granularity == 0
        largest = allocator.largest_free
        assert 0 <= largest <= allocator.free_bytes
        copy.deepcopy(allocator).allocate(largest)
        with pytest.raises(OutOfMemoryError):
            copy.deepcopy(allocator).allocate(largest + 1)


@KINDS
@given(
    steps=STEPS,
    capacity=st.integers(0, 300 * MIB),
    granularity=st.sampled_from([None, 512, 64 * KIB, 8 * MIB]),
)
def test_books_are_kept(
    kind: type[SimulatedAllocator], steps: list[tuple[bool, int, int]], capacity: int, granularity: int | None
) -> None:
    watched = Watched(kind(capacity, granularity))
    reserved = 0
    for step in steps:
        watched.step(*step)
        watched.check()
        reserved = max(reserved, watched.allocator.reserved)
    for address, _ in watched.blocks:
        watched.allocator.free(address)
    assert (watched.allocator.requested, watched.allocator.used) == (0, 0)
    assert watched.allocator.reserved == (reserved if kind is PoolAllocator else 0)


@KINDS
def test_what_is_not_live_cannot_be_freed(kind: type[SimulatedAllocator]) -> None:
    allocator = kind(GIB)
    address = allocator.allocate(5 * MIB)
    allocator.free(address)
    for other in (address, 7):
        with pytest.raises(UnknownPointerError):
            allocator.free(other)
    assert (allocator.requested, allocator.used) == (0, 0)


@KINDS
def test_arguments(kind: type[SimulatedAllocator]) -> None:
    for granularity in (0, 511, 513, -512):
        with pytest.raises(ValueError, match=f"a granularity of {granularity} bytes is no multiple of 512"):
            kind(GIB, granularity)
    with pytest.raises(ValueError, match="a capacity of -1 bytes"):
        kind(-1)
    with pytest.raises(OutOfMemoryError, match="why=full"):
        kind(0).allocate(1)


def test_pool_takes_the_smallest_piece_that_fits() -> None:
    pool = PoolAllocator(GIB)
    blocks = [pool.allocate(size * MIB) for size in (8, 1, 4, 1, 6, 1, 11)]
    for place in (0, 2, 4):
        pool.free(blocks[place])
    assert pool.reserved == 32 * MIB
    assert pool.allocate(4 * MIB) == blocks[2]
    assert pool.allocate(5 * MIB) == blocks[4]
    assert pool.allocate(7 * MIB) == blocks[0]
    assert (pool.reserved, pool.largest_free) == (32 * MIB, GIB - 32 * MIB)


def test_pool_joins_free_neighbours_and_grows_by_what_is_lacking() -> None:
    pool = PoolAllocator(100 * MIB)
    first, second, third = (pool.allocate(10 * MIB) for _ in range(3))
    pool.free(first)
    pool.free(third)
    pool.free(second)
    assert pool.allocate(32 * MIB) == first
    pool.free(first)
    pool.allocate(33 * MIB)
    assert pool.reserved == 64 * MIB
    with pytest.raises(OutOfMemoryError, match="why=full"):
        pool.allocate(90 * MIB)
    with pytest.raises(
        OutOfMemoryError, match="why=fragmentation"
    ):  # 67 MiB are free, 4 of them in no whole step
        pool.allocate(64 * MIB)
    assert pool.allocate(63 * MIB) == first + 33 * MIB


def test_slab_shares_steps_with_its_own_class_only() -> None:
    slab = SlabAllocator(GIB)
    small = [slab.allocate(20 * KIB) for _ in range(102)]
    assert slab.reserved == 2 * MIB
    assert slab.used == 102 * 20 * KIB
    slab.allocate(20 * KIB)
    assert slab.reserved == 4 * MIB
    slab.allocate(24 * KIB)
    assert slab.reserved == 6 * MIB
    slab.free(small[50])
    assert slab.allocate(18 * KIB) == small[50]
    assert slab.allocate(MIB) not in range(small[0], small[0] + 2 * MIB)
    assert slab.reserved == 8 * MIB


@given(st.integers(1, 1 << 22))
def test_size_classes(size: int) -> None:
    found = size_class(size)
    assert size <= found
    assert found % 512 == 0
    assert found < size + 512 or found * 4 <= size * 5
    assert size_class(found) == found
