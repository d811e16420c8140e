"""What an observer saw, less our own, is what went past the allocator. The observer here is made up."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.cuda.bypass import Bypass, BypassBook, ObservedAllocation, ObservedFailure
from engine.memory.cuda.device import CudaDeviceAccount
from engine.memory.cuda.observed import ObservedCudaRuntime
from engine.memory.cuda.resources import CudaMallocMemoryResource, CudaPoolMemoryResource
from engine.memory.errors import OutOfMemoryError, StickyDeviceError
from engine.memory.house import MemoryHouse
from engine.memory.settings import TraceSettings
from tests.memory.cuda.model_driver import CONTEXT, GIB, ILLEGAL_ADDRESS, MIB, ModelDriver, ModelUsage

POOL = 0xB001
OWN_POOL = 0xB002
ON = TraceSettings(trace=True, stats=True, records=1024)


class SeeingDriver(ModelDriver):
    """A driver all of whose calls an observer sees, as CUPTI does: late, when it is flushed."""

    def __init__(self, total: int = 24 * GIB) -> None:
        super().__init__(total)
        self.book = BypassBook()
        self.book.observer = self
        self.seen: list[ObservedAllocation | ObservedFailure] = []
        self.open = True
        self.others_reserved = 0

    def flush(self) -> None:
        seen, self.seen = self.seen, []
        # Reports come in a thread of the observer's.
        thread = threading.Thread(target=lambda: [self.book.observe(report) for report in seen])
        thread.start()
        thread.join()

    def close(self) -> None:
        self.open = False

    @property
    def free_bytes(self) -> int:
        return super().free_bytes - self.others_reserved

    def fail(self, call: str, code: int) -> None:
        if not self.book.is_ours:
            self.seen.append(ObservedFailure(-1, call, code))
        super().fail(call, code)

    def malloc(self, size: int) -> int:
        ptr = super().malloc(size)
        self.seen.append(ObservedAllocation(ptr, size))
        return ptr

    def free(self, ptr: int) -> None:
        size = self.blocks[ptr]
        super().free(ptr)
        self.seen.append(ObservedAllocation(ptr, size, is_release=True))

    def pool_malloc(self, size: int, pool: object, stream: int) -> int:
        ptr = super().pool_malloc(size, pool, stream)
        self.seen.append(ObservedAllocation(ptr, size, pool=OWN_POOL, pool_reserved=self.reserved))
        return ptr

    def pool_free(self, ptr: int, stream: int) -> None:
        size = self.pool_blocks[ptr]
        super().pool_free(ptr, stream)
        self.seen.append(ObservedAllocation(ptr, size, is_release=True, pool=OWN_POOL))


def build(kind: type, driver: SeeingDriver, output: io.StringIO | None = None) -> tuple[MemoryHouse, object]:
    runtime = ObservedCudaRuntime(driver, driver.book)
    memory = kind(CudaDeviceAccount(runtime, ModelUsage(driver), driver.book), runtime)
    return MemoryHouse.build(memory, ON, output=output), memory


@pytest.fixture(params=[CudaMallocMemoryResource, CudaPoolMemoryResource])
def kind(request: pytest.FixtureRequest) -> type:
    return request.param


def bypass_lines(output: io.StringIO) -> list[str]:
    return [line for line in output.getvalue().splitlines() if "BYPASS" in line]


def test_what_the_resources_ask_for_is_no_bypass(kind):
    driver, output = SeeingDriver(), io.StringIO()
    house, _ = build(kind, driver, output)
    blocks = [(house.resource.acquire(size, None), size) for size in (0, 1, 5 * MIB, 64 * MIB)]
    for _ in range(3):
        ledger = house.ledger()
        assert (ledger.bypass, ledger.residual) == (0, 0)
        ptr, size = blocks.pop()
        house.resource.release(ptr, size, None)
    assert bypass_lines(output) == []


def test_what_goes_past_them_has_its_line_and_its_entry(kind):
    driver, output = SeeingDriver(), io.StringIO()
    house, _ = build(kind, driver, output)
    house.resource.acquire(64 * MIB, None)
    behind = driver.malloc(48 * MIB)
    ledger = house.ledger("after the theft")
    assert (ledger.bypass, ledger.residual) == (48 * MIB, 0)
    assert ledger.entries()["bypass"] == 48 * MIB
    assert "bypass" in ledger.render()
    assert bypass_lines(output) == ["[cuda-alloc] BYPASS size=48.0 MiB kind=device name=unknown"]
    assert any("BYPASS size=48.0 MiB" in line for line in house.last_lines()), "the recorder has it too"

    driver.free(behind)
    ledger = house.ledger()
    assert (ledger.bypass, ledger.residual) == (0, 0)
    assert len(bypass_lines(output)) == 1, "each is told once"


def test_another_pool_counts_with_all_that_it_reserves(kind):
    driver = SeeingDriver()
    house, _ = build(kind, driver)
    house.resource.acquire(MIB, None)
    driver.others_reserved = 32 * MIB
    driver.seen.append(ObservedAllocation(1 << 50, 3 * MIB, pool=POOL, pool_reserved=32 * MIB))
    assert (house.ledger().bypass, house.ledger().residual) == (32 * MIB, 0)
    driver.others_reserved = 0
    driver.seen.append(
        ObservedAllocation(1 << 50, 3 * MIB, is_release=True, pool=POOL, pool_reserved=32 * MIB)
    )
    assert (house.ledger().bypass, house.ledger().residual) == (0, 0)


def test_a_pool_whose_reserve_is_not_told_counts_with_what_is_used():
    driver = SeeingDriver()
    house, _ = build(CudaMallocMemoryResource, driver)
    for at, size in ((1 << 50, 3 * MIB), (1 << 51, 4 * MIB)):
        driver.seen.append(ObservedAllocation(at, size, pool=POOL))
    assert house.ledger().bypass == 7 * MIB


def test_what_others_take_of_our_pool_is_told_and_not_counted_twice():
    driver, output = SeeingDriver(), io.StringIO()
    house, _ = build(CudaPoolMemoryResource, driver, output)
    house.resource.acquire(40 * MIB, None)
    driver.pool_malloc(10 * MIB, None, 0)  # a kernel that calls our pool itself
    ledger = house.ledger()
    assert bypass_lines(output) == ["[cuda-alloc] BYPASS size=10.0 MiB kind=device_async name=unknown"]
    assert (ledger.bypass, ledger.residual) == (0, 0)


def test_what_a_module_brings_is_told_and_stays_the_librarys():
    driver, output = SeeingDriver(), io.StringIO()
    house, memory = build(CudaMallocMemoryResource, driver, output)
    with memory.account.library_step():
        driver.neighbours += 2 * MIB
        driver.seen.append(ObservedAllocation(1 << 50, 4096, "device_static", "small"))
        driver.seen.append(ObservedAllocation(1 << 51, 16 * MIB, "device_static", "lookup table"))
    ledger = house.ledger()
    assert (ledger.library, ledger.bypass) == (2 * MIB, 0)
    large = "[cuda-alloc] BYPASS size=16.0 MiB kind=device_static name=lookup table step=library"
    assert bypass_lines(output) == [large], "of the hundreds that modules bring only large ones are printed"
    assert [line for line in house.last_lines() if "BYPASS" in line] == [
        "[cuda-alloc] BYPASS size=0.0 MiB kind=device_static name=small step=library",
        large,
    ]


def test_a_refusal_behind_the_allocator_is_told_and_ours_is_not(kind):
    driver, output = SeeingDriver(total=2 * GIB), io.StringIO()
    house, _ = build(kind, driver, output)
    driver.seen.append(ObservedFailure(4 * GIB, "cudaMalloc", 2))
    with pytest.raises(OutOfMemoryError):
        house.resource.allocate(3 * GIB)
    lines = output.getvalue().splitlines()
    assert bypass_lines(output) == [
        "[cuda-alloc] BYPASS size=4096.0 MiB kind=device name=cudaMalloc failed=yes code=2"
    ]
    assert "FAILED" in lines[-1], "what went past us is told before the failure that it may explain"


def test_after_a_lost_context_the_observer_is_not_asked():
    driver = SeeingDriver()
    house, memory = build(CudaMallocMemoryResource, driver)
    driver.broken = ILLEGAL_ADDRESS
    with pytest.raises(StickyDeviceError):
        memory.acquire(MIB, None)
    driver.flush = lambda: pytest.fail("CUPTI was asked")
    assert house.ledger("at failure").context == CONTEXT


def test_closing_the_resource_ends_the_observation(kind):
    driver = SeeingDriver()
    _, memory = build(kind, driver)
    memory.close()
    memory.close()
    assert not driver.open


def test_nothing_is_told_to_a_closed_house():
    driver, output = SeeingDriver(), io.StringIO()
    house, memory = build(CudaMallocMemoryResource, driver, output)
    house.close()
    driver.malloc(MIB)
    assert memory.overheads().bypass == MIB
    assert bypass_lines(output) == []


def test_a_name_is_one_word_of_a_line():
    text = Bypass(1, "device", "two\nlines ").describe()
    assert text == "kind=device name=two lines"


@pytest.mark.parametrize("bypass", [
    Bypass(1, "managed_static_async", "_ZN" + 200 * "x" + "BYTESE", in_library_step=True),
    Bypass(1, "managed_static_async", 200 * "y", error_code=999),
])  # fmt: skip
def test_a_long_name_leaves_room_in_the_record_for_what_follows(bypass):
    driver = SeeingDriver()
    house, _ = build(CudaMallocMemoryResource, driver)
    driver.book.listener(bypass)
    (line,) = house.last_lines()
    assert line.endswith(" step=library" if bypass.in_library_step else " failed=yes code=999")
    assert f" name={bypass.name[:20]}" in line
    assert f"{bypass.name[-20:]} " in line


def test_what_graphs_reserve_is_counted_once():
    """As CUPTI reports a graph that allocates: a reserve without an address, then a pool's block."""
    driver, output = SeeingDriver(), io.StringIO()
    house, _ = build(CudaMallocMemoryResource, driver, output)
    driver.others_reserved = 32 * MIB
    driver.seen.append(ObservedAllocation(0, 32 * MIB, "graph_reserve"))
    driver.seen.append(ObservedAllocation(1 << 50, 24 * MIB, pool=POOL))
    assert (house.ledger().bypass, house.ledger().residual) == (32 * MIB, 0)
    driver.seen.append(ObservedAllocation(1 << 50, 24 * MIB, is_release=True, pool=POOL))
    assert (house.ledger().bypass, house.ledger().residual) == (32 * MIB, 0)
    driver.others_reserved = 0
    driver.seen.append(ObservedAllocation(0, 32 * MIB, "graph_reserve", is_release=True))
    assert (house.ledger().bypass, house.ledger().residual) == (0, 0)
    assert bypass_lines(output) == [
        "[cuda-alloc] BYPASS size=32.0 MiB kind=graph_reserve name=unknown",
        "[cuda-alloc] BYPASS size=24.0 MiB kind=device_async name=unknown",
    ]


@given(st.data())
def test_whatever_is_asked_for_in_whatever_order_the_bypasses_are_told_from_ours(data):
    """Addresses are used again at once, by either side, and reports come whenever they come."""
    driver = SeeingDriver()
    _, memory = build(CudaMallocMemoryResource, driver)
    told: list[Bypass] = []
    driver.book.listener = told.append
    free_addresses: list[int] = []
    own, others, ever = {}, {}, 0
    plain_malloc = ModelDriver.malloc

    def reuse(size: int) -> int:
        ptr = free_addresses.pop() if free_addresses else plain_malloc(driver, size)
        driver.blocks[ptr] = size
        driver.seen.append(ObservedAllocation(ptr, size))
        return ptr

    driver.malloc = reuse
    for act in data.draw(st.lists(st.sampled_from(["own", "other", "free own", "free other", "settle"]))):
        size = data.draw(st.sampled_from([MIB, 2 * MIB])) if act in ("own", "other") else 0
        if act == "own":
            own[memory.acquire(size, None)] = size
        elif act == "other":
            others[driver.malloc(size)] = size
            ever += 1
        elif act == "free own" and own:
            ptr = data.draw(st.sampled_from(sorted(own)))
            memory.release(ptr, own.pop(ptr), None)
            free_addresses.append(ptr)
        elif act == "free other" and others:
            ptr = data.draw(st.sampled_from(sorted(others)))
            driver.free(ptr)
            others.pop(ptr)
            free_addresses.append(ptr)
        elif act == "settle":
            driver.book.settle()
    driver.book.settle()
    assert len(told) == ever
    assert driver.book.live == sum(others.values())
