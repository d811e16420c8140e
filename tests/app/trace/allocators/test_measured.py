"""The simulated allocators against what a real driver did: an H200, driver 580, CUDA 13.0.

The two traces are of whole runs (tests/data/traces). The other figures are of the same machine.
"""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from app.trace.allocators import MallocAllocator, PoolAllocator, SimulatedAllocator
from engine.memory.record import EventKind, TraceEvent
from tests.app.trace.making import events_of

DATA = Path(__file__).resolve().parents[3] / "data" / "traces"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
STEP = 2 * MIB


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[TraceEvent]:
    """A 27B-class model is loaded, generates and is given back."""
    return unpacked("h200-27b-malloc", tmp_path_factory)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[TraceEvent]:
    """A small checkpoint of mixed precisions."""
    return unpacked("h200-mixed-malloc", tmp_path_factory)


def unpacked(name: str, factory: pytest.TempPathFactory) -> list[TraceEvent]:
    path = factory.mktemp("h200") / "trace"
    path.write_bytes(lzma.decompress((DATA / f"{name}.trace.xz").read_bytes()))
    return events_of(path)


class Run:
    """A trace's events one by one against an allocator."""

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self.allocator = allocator
        self.addresses: dict[int, int] = {}

    def step(self, event: TraceEvent) -> int:
        """The block's address."""
        if event.kind is EventKind.ALLOC:
            self.addresses[event.sequence] = self.allocator.allocate(event.size)
            return self.addresses[event.sequence]
        address = self.addresses.pop(event.sequence)
        self.allocator.free(address)
        return address


@pytest.mark.parametrize(("name", "readings"), [("reference", 1048), ("mixed", 11)])
def test_malloc_takes_what_the_driver_took(name: str, readings: int, request: pytest.FixtureRequest) -> None:
    """At each of the driver's own readings of free memory, to the byte.

    Beside the allocator's, only the 4 MiB of kernels that were loaded meanwhile left the card, in two steps.
    """
    run = Run(MallocAllocator(1 << 50))
    others: list[int] = []
    for event in request.getfixturevalue(name):
        run.step(event)
        if event.free_is_read:
            assert event.free is not None
            others.append(-event.free - run.allocator.reserved)
    assert len(others) == readings
    assert others == sorted(others)
    assert {taken - others[0] for taken in others} <= {0, STEP, 2 * STEP}
    assert run.allocator.reserved == 0


@pytest.mark.parametrize("name", ["reference", "mixed"])
def test_malloc_shares_steps_as_the_driver_does(name: str, request: pytest.FixtureRequest) -> None:
    """Small blocks lie at the same places of their steps: the smallest free piece is taken, 512-aligned."""
    run = Run(MallocAllocator(1 << 50))
    small = 0
    for event in request.getfixturevalue(name):
        address = run.step(event)
        if event.kind is EventKind.ALLOC and event.size <= MIB:
            assert address % STEP == event.pointer % STEP, event
            small += 1
        elif event.kind is EventKind.ALLOC:
            assert event.pointer % STEP == 0
    assert small > 30


def loaded(
    events: list[TraceEvent], allocator: SimulatedAllocator, kv: int | None = None
) -> SimulatedAllocator:
    """`allocator` after the last allocation of `events`, with all blocks of the KV cache `kv` bytes large."""
    run = Run(allocator)
    last = max(event.index for event in events if event.kind is EventKind.ALLOC)
    for event in events[:last]:
        run.step(replace(event, size=kv) if kv is not None and event.tag.startswith("kv/") else event)
    return allocator


def test_ledgers_of_the_reference_run(reference: list[TraceEvent]) -> None:
    """Rounding and slack that were measured after the load, cudaMalloc and pool: benchmarks/results."""
    malloc = loaded(reference, MallocAllocator(1 << 50))
    assert malloc.requested == 18_253_547_280
    assert malloc.reserved - malloc.requested == 239_139_056
    pool = loaded(reference, PoolAllocator(1 << 50))
    assert pool.reserved - pool.requested == 63_728


def test_ledgers_of_the_mixed_checkpoint(mixed: list[TraceEvent]) -> None:
    """The same with 4 x 256 MiB of KV cache: 538 steps by cudaMalloc, 34 of 32 MiB by the pool."""
    assert loaded(mixed, MallocAllocator(1 << 50), 256 * MIB).reserved == 1_128_267_776
    assert loaded(mixed, PoolAllocator(1 << 50), 256 * MIB).reserved == 1_140_850_688


@pytest.mark.parametrize(("size", "taken"), [(64 * KIB, 4 * MIB), (MIB, 64 * MIB)])
def test_64_small_requests(size: int, taken: int) -> None:
    malloc = MallocAllocator(GIB)
    for _ in range(64):
        malloc.allocate(size)
    assert malloc.reserved == taken


def test_pool_grows_by_32_mib_and_keeps() -> None:
    pool = PoolAllocator(GIB)
    address = pool.allocate(1)
    assert pool.reserved == 32 * MIB
    pool.free(address)
    assert pool.reserved == 32 * MIB
    pool.allocate(33 * MIB)
    assert pool.reserved == 64 * MIB
