"""What holds for every memory resource that gives real addresses: host, plan, and both of CUDA's.

CUDA's run on a model of the driver, and where there is a device on that too (``-m gpu``).
"""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.memory.adaptors import (
    LimitingMemoryResource,
    StatisticsMemoryResource,
    TracingMemoryResource,
    gauge_of,
)
from engine.memory.base import PointerResource
from engine.memory.errors import OutOfMemoryError, UnknownPointerError, Why
from engine.memory.house import MemoryHouse
from engine.memory.record import TraceHeader
from engine.memory.recorder import FlightRecorder
from engine.memory.resources import HostMemoryResource, PlanningMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings

MIB = 1 << 20
GIB = 1 << 30
SIZES = (0, 1, 1000, 64 << 10, MIB, 3 * MIB + 7, 40 * MIB)


def host() -> PointerResource:
    return HostMemoryResource(8 * GIB)


def plan() -> PointerResource:
    return PlanningMemoryResource(8 * GIB, granularity=512)


def modelled(name: str) -> PointerResource:
    from engine.memory.cuda import resources
    from engine.memory.cuda.device import CudaDeviceAccount
    from tests.memory.cuda.model_driver import ModelDriver, ModelUsage

    driver = ModelDriver(total=8 * GIB)
    resource = getattr(resources, name)(CudaDeviceAccount(driver, ModelUsage(driver)), driver)
    assert isinstance(resource, PointerResource)
    return resource


def on_device(allocator: Any) -> PointerResource:
    from engine.backend.cuda.requirements import check_device
    from engine.errors import ConfigurationError
    from engine.memory.cuda.opening import open_cuda_memory

    try:
        check_device(0)
    except ConfigurationError as error:
        pytest.skip(f"no CUDA device: {error}")
    return open_cuda_memory(allocator)


RESOURCES = {
    "host": host,
    "plan": plan,
    "cudaMalloc": lambda: modelled("CudaMallocMemoryResource"),
    "pool": lambda: modelled("CudaPoolMemoryResource"),
}
ON_DEVICE = {"cudaMalloc on the device": "malloc", "pool on the device": "pool"}


@pytest.fixture(
    params=[*RESOURCES, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_DEVICE)],
)
def resource(request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.param
    resource = on_device(ON_DEVICE[name]) if name in ON_DEVICE else RESOURCES[name]()
    yield resource
    assert resource.live == 0, "a test gave back all it took"
    if (close := getattr(resource, "close", None)) is not None:
        close()


def traced(upstream: Any, lines: Any = None) -> TracingMemoryResource:
    return TracingMemoryResource(upstream, FlightRecorder.in_memory(TraceHeader(capacity=4096)), lines=lines)


def test_blocks_are_disjoint_and_come_back_to_zero(resource: Any) -> None:
    blocks = [(resource.acquire(size, None), size) for size in SIZES * 3]
    assert resource.live == 3 * sum(SIZES)
    spans = sorted((ptr, ptr + max(size, 1)) for ptr, size in blocks)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for ptr, size in blocks[::2] + blocks[1::2]:
        resource.release(ptr, size, None)
    assert resource.live == 0


def test_what_is_not_held_is_not_freed(resource: Any) -> None:
    ptr = resource.acquire(MIB, None)
    with pytest.raises(UnknownPointerError):
        resource.release(ptr, MIB - 1, None)
    with pytest.raises(UnknownPointerError):
        resource.release(ptr + 512, MIB, None)
    assert resource.live == MIB
    resource.release(ptr, MIB, None)
    with pytest.raises(UnknownPointerError):
        resource.release(ptr, MIB, None)


ADAPTORS = {
    "tracing": traced,
    "statistics": StatisticsMemoryResource,
    "limiting": lambda upstream: LimitingMemoryResource(upstream, 50 * MIB),
}


@pytest.mark.parametrize("order", list(itertools.permutations(ADAPTORS)), ids="-".join)
def test_counts_are_the_same_in_every_order(resource: Any, order: tuple[str, ...]) -> None:
    layers: dict[str, Any] = {}
    top = resource
    for name in order:
        top = layers[name] = ADAPTORS[name](top)
    held = []
    refused = 0
    for size in (*SIZES, 2 * MIB, 30 * MIB):
        try:
            held.append((top.acquire(size, None), size))
        except OutOfMemoryError as error:
            refused += error.why is Why.CAP
    live = sum(size for _, size in held)
    statistics = layers["statistics"].statistics().total
    tracing = layers["tracing"]
    assert refused == 1
    assert tracing.live == statistics.live_bytes == layers["limiting"].live == resource.live == live
    assert tracing.allocations == statistics.allocations == len(held)
    # A watcher below the limit does not see what the limit refuses.
    for name, failures in (("tracing", tracing.failures), ("statistics", statistics.failures)):
        assert failures == (refused if order.index(name) > order.index("limiting") else 0)
    for ptr, size in held:
        top.release(ptr, size, None)
    assert tracing.live == layers["limiting"].live == 0
    assert tracing.frees == layers["statistics"].statistics().total.frees == len(held)


def test_the_ledger_names_every_byte_that_is_taken(resource: Any) -> None:
    house = MemoryHouse.build(resource, TraceSettings(trace=True, stats=True, records=1024))
    before = house.ledger()
    held = []
    for tag, size in (("weights/a", 64 * MIB), ("kv", 3 * MIB + 1), ("workspace", 700)):
        with memory_scope(tag):
            held.append((house.resource.acquire(size, None), size))
    ledger = house.ledger()
    assert ledger.segments == {"weights": 64 * MIB, "kv": 3 * MIB + 1, "workspace": 700}
    assert ledger.residual == before.residual
    assert sum(ledger.entries().values()) == ledger.total
    for ptr, size in held:
        house.resource.release(ptr, size, None)
    assert house.ledger().residual == before.residual
    assert house.ledger().segments == {}
    house.close()


def test_a_device_that_is_full_says_so_and_goes_on(resource: Any) -> None:
    from engine.memory.lines import LineWriter

    gauge = gauge_of(resource)
    assert gauge is not None
    output = io.StringIO()
    top = traced(resource, LineWriter(output))
    with pytest.raises(OutOfMemoryError) as caught:
        top.acquire(gauge.total + GIB, None)
    assert caught.value.why in (Why.FULL, Why.NEIGHBOUR)
    assert caught.value.free is not None
    assert output.getvalue().count(" FAILED #1 ") == 1
    ptr = top.acquire(MIB, None)
    assert (top.live, top.failures) == (MIB, 1)
    top.release(ptr, MIB, None)


def test_threads_lose_nothing(resource: Any) -> None:
    top = traced(StatisticsMemoryResource(resource))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                size = SIZES[(seed + i) % len(SIZES)] // 8
                ptr = top.acquire(size, None)
                top.release(ptr, size, None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (top.live, top.allocations, top.frees) == (0, 160, 160)
