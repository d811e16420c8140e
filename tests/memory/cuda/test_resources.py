"""The CUDA resources against a model of the driver that behaves as one was measured to.

Measured on an H200 with driver 580: cudaMalloc takes 2 MiB steps that small blocks share, a pool grows in
32 MiB steps and keeps them, and a pool request that fails first grows the pool over all free memory.
"""

from __future__ import annotations

import pytest

from engine.memory.cuda.device import CudaDeviceAccount
from engine.memory.cuda.resources import DRIVER_STEP, CudaMallocMemoryResource, CudaPoolMemoryResource
from engine.memory.cuda.runtime import OUT_OF_MEMORY, CudaCallError, is_sticky
from engine.memory.errors import OutOfMemoryError, StickyDeviceError, Why

MIB = 1 << 20
GIB = 1 << 30
POOL_STEP = 32 * MIB
ILLEGAL_ADDRESS = 700
CONTEXT = 527 * MIB


class ModelDriver:
    """A device of `total` bytes of which `neighbours` are taken. One pool. Counts every call."""

    def __init__(self, total: int = 24 * GIB, neighbours: int = 0) -> None:
        self.total, self.neighbours = total, neighbours
        self.blocks: dict[int, int] = {}
        self.pool_blocks: dict[int, int] = {}
        self.unobserved = 0
        """bytes freed in stream order that the pool cannot use before a synchronisation"""
        self.reserved = 0
        self.keep = 0
        self.max_size = 0
        self.next = 1 << 40
        self.broken = 0
        """error code that every call returns"""
        self.last_error = 0
        self.calls: list[str] = []
        self.context = 0

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.broken:
            self.fail(call, self.broken)

    def fail(self, call: str, code: int) -> None:
        self.last_error = code
        text = "out of memory" if code == OUT_OF_MEMORY else "an illegal memory access was encountered"
        raise CudaCallError(call, code, text)

    @property
    def free_bytes(self) -> int:
        steps = {
            step
            for ptr, size in self.blocks.items()
            for step in range(ptr // DRIVER_STEP, (ptr + size - 1) // DRIVER_STEP + 1)
        }
        return self.total - self.neighbours - self.context - len(steps) * DRIVER_STEP - self.reserved

    @property
    def used(self) -> int:
        return sum(self.pool_blocks.values()) + self.unobserved

    def malloc(self, size: int) -> int:
        self._enter("cudaMalloc")
        if size >= DRIVER_STEP:
            self.next = -(-self.next // DRIVER_STEP) * DRIVER_STEP
        ptr = self.next
        before = self.free_bytes
        self.blocks[ptr] = size
        if self.free_bytes < 0 or before < 0:
            del self.blocks[ptr]
            self.fail("cudaMalloc", OUT_OF_MEMORY)
        self.next = ptr + -(-size // 512) * 512
        if size >= DRIVER_STEP:
            self.next = -(-self.next // DRIVER_STEP) * DRIVER_STEP
        return ptr

    def free(self, ptr: int) -> None:
        self._enter("cudaFree")
        del self.blocks[ptr]

    def pool_malloc(self, size: int, pool: object, stream: int) -> int:
        self._enter("cudaMallocFromPoolAsync")
        if self.max_size and self.used + size > self.max_size:
            self.fail("cudaMallocFromPoolAsync", OUT_OF_MEMORY)
        missing = self.used + size - self.reserved
        if missing > 0:
            growth = -(-missing // POOL_STEP) * POOL_STEP
            if growth > self.free_bytes:
                self.reserved += max(self.free_bytes, 0)
                self.fail("cudaMallocFromPoolAsync", OUT_OF_MEMORY)
            self.reserved += growth
        self.next += 1 << 36
        self.pool_blocks[self.next] = size
        return self.next

    def pool_free(self, ptr: int, stream: int) -> None:
        self._enter("cudaFreeAsync")
        self.unobserved += self.pool_blocks.pop(ptr)

    def pool_create(self, max_size: int) -> object:
        self._enter("cudaMemPoolCreate")
        self.max_size = max_size
        return object()

    def pool_destroy(self, pool: object) -> None:
        self._enter("cudaMemPoolDestroy")
        self.reserved = 0

    def pool_keep(self, pool: object, threshold: int) -> None:
        self._enter("cudaMemPoolSetAttribute")
        self.keep = threshold

    def pool_bytes(self, pool: object) -> tuple[int, int]:
        self._enter("cudaMemPoolGetAttribute")
        return self.used, self.reserved

    def pool_trim(self, pool: object) -> None:
        self._enter("cudaMemPoolTrimTo")
        self.reserved = -(-self.used // POOL_STEP) * POOL_STEP

    def memory_info(self) -> tuple[int, int]:
        self._enter("cudaMemGetInfo")
        self.context = CONTEXT
        return max(self.free_bytes, 0), self.total

    def synchronize(self) -> None:
        self._enter("cudaDeviceSynchronize")
        self.unobserved = 0

    def clear_last_error(self) -> int:
        self.calls.append("cudaGetLastError")
        code, self.last_error = self.last_error, 0
        return code


class ModelUsage:
    """What the management library says of the model driver."""

    def __init__(self, driver: ModelDriver, *, tells_processes: bool = True) -> None:
        self.driver, self.tells_processes = driver, tells_processes

    def used(self) -> int | None:
        return self.driver.total - self.driver.free_bytes

    def used_by_others(self) -> int | None:
        return self.driver.neighbours if self.tells_processes else None


def build(kind: type, driver: ModelDriver, **options: int) -> tuple[CudaDeviceAccount, object]:
    account = CudaDeviceAccount(driver, ModelUsage(driver))
    return account, kind(account, driver, **options)


@pytest.fixture(params=[CudaMallocMemoryResource, CudaPoolMemoryResource])
def kind(request: pytest.FixtureRequest) -> type:
    return request.param


def test_blocks_come_back_to_zero(kind):
    driver = ModelDriver()
    _, memory = build(kind, driver)
    blocks = [(memory.acquire(size, None), size) for size in (0, 1, 5 * MIB, 64 * MIB)]
    assert memory.live == 69 * MIB + 1
    assert len({ptr for ptr, _ in blocks}) == 4
    for ptr, size in blocks:
        memory.release(ptr, size, None)
    assert memory.live == 0
    assert not driver.blocks
    assert not driver.pool_blocks


def test_the_ledger_closes(kind):
    driver = ModelDriver(neighbours=2 * GIB)
    _, memory = build(kind, driver)
    held = [(memory.acquire(size, None), size) for size in [64 << 10] * 64 + [3 * MIB, 700 * MIB]]
    for _ in range(2):
        over = memory.overheads()
        ours = memory.live + over.rounding + over.pool_slack
        named = ours + over.context + over.library + over.other_processes
        assert memory.total - memory.read_free() == named
        assert over.context == CONTEXT
        assert over.other_processes == 2 * GIB
        ptr, size = held.pop()
        memory.release(ptr, size, None)


def test_small_blocks_share_steps():
    """64 requests of 64 KiB took 4 MiB on the device, 64 of 1 MiB took 64."""
    _, memory = build(CudaMallocMemoryResource, ModelDriver())
    for _ in range(64):
        memory.acquire(64 << 10, None)
    assert memory.overheads().rounding == 0
    memory.acquire(2 * MIB + 1, None)
    assert memory.overheads().rounding == 2 * MIB - 1


def test_a_full_card_is_full(kind):
    driver = ModelDriver(total=4 * GIB)
    _, memory = build(kind, driver)
    memory.acquire(2 * GIB, None)
    with pytest.raises(OutOfMemoryError) as caught:
        memory.acquire(3 * GIB, None)
    assert caught.value.why is Why.FULL
    assert caught.value.request.error_code == OUT_OF_MEMORY
    # All that the pool grew over while it failed is free again, and the figure says so.
    assert caught.value.free == 4 * GIB - CONTEXT - 2 * GIB
    assert memory.last_retries() == 1
    assert driver.last_error == 0, "the next kernel would be blamed"
    memory.acquire(GIB, None)


def test_a_neighbour_is_named(kind):
    _, memory = build(kind, ModelDriver(total=8 * GIB, neighbours=5 * GIB))
    with pytest.raises(OutOfMemoryError) as caught:
        memory.acquire(4 * GIB, None)
    assert caught.value.why is Why.NEIGHBOUR


def test_frees_that_the_pool_has_not_observed_are_waited_for():
    driver = ModelDriver(total=4 * GIB)
    _, memory = build(CudaPoolMemoryResource, driver)
    first = memory.acquire(2 * GIB, None)
    memory.release(first, 2 * GIB, None)
    memory.acquire(3 * GIB, None)
    assert memory.last_retries() == 1
    memory.acquire(1 * MIB, None)
    assert memory.last_retries() == 0


def test_a_pool_with_room_that_refuses_is_fragmented():
    driver = ModelDriver(total=4 * GIB)
    _, memory = build(CudaPoolMemoryResource, driver)
    memory.acquire(GIB, None)
    driver.pool_malloc = lambda size, pool, stream: driver.fail("cudaMallocFromPoolAsync", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError) as caught:
        memory.acquire(GIB, None)
    assert caught.value.why is Why.FRAGMENTATION


def test_cudamalloc_refused_with_room_is_address_space():
    driver = ModelDriver(total=4 * GIB)
    _, memory = build(CudaMallocMemoryResource, driver)
    driver.malloc = lambda size: driver.fail("cudaMalloc", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError) as caught:
        memory.acquire(GIB, None)
    assert caught.value.why is Why.ADDRESS_SPACE


def test_the_pools_own_cap_is_told_from_a_full_card():
    """Both answer cudaErrorMemoryAllocation."""
    driver = ModelDriver()
    _, memory = build(CudaPoolMemoryResource, driver, max_size=GIB)
    memory.acquire(256 * MIB, None)
    with pytest.raises(OutOfMemoryError) as caught:
        memory.acquire(2 * GIB, None)
    assert caught.value.why is Why.CAP
    assert "cudaMemPoolTrimTo" not in driver.calls, "no retry can help against a cap"


def test_an_earlier_error_is_not_out_of_memory(kind):
    driver = ModelDriver()
    _, memory = build(kind, driver)
    ptr = memory.acquire(MIB, None)
    driver.broken = ILLEGAL_ADDRESS
    with pytest.raises(StickyDeviceError) as caught:
        memory.acquire(MIB, None)
    assert is_sticky(ILLEGAL_ADDRESS)
    assert caught.value.why is Why.EARLIER_ERROR
    assert caught.value.request.error_code == ILLEGAL_ADDRESS

    asked = len(driver.calls)
    with pytest.raises(StickyDeviceError, match="nothing was asked of CUDA"):
        memory.acquire(MIB, None)
    memory.release(ptr, MIB, None)
    assert memory.overheads().context == CONTEXT, "the ledger of the failure record still needs its figures"
    with pytest.raises(CudaCallError):
        memory.read_free()
    assert len(driver.calls) == asked


def test_a_sticky_error_found_while_making_room(kind):
    driver = ModelDriver(total=2 * GIB)
    _, memory = build(kind, driver)
    driver.synchronize = lambda: driver.fail("cudaDeviceSynchronize", ILLEGAL_ADDRESS)
    with pytest.raises(StickyDeviceError):
        memory.acquire(4 * GIB, None)


def test_the_librarys_bytes_are_measured_where_they_appear():
    driver = ModelDriver()
    account, memory = build(CudaMallocMemoryResource, driver)
    with account.library_step():
        memory.acquire(10 * MIB, None)
        driver.neighbours += 48 * MIB  # a module's bytes: gone from the device, through no resource
    assert account.library == 48 * MIB


def test_without_the_management_library_the_context_counts_as_a_neighbour():
    driver = ModelDriver(neighbours=GIB)

    class Silent:
        def used(self) -> None:
            return None

        def used_by_others(self) -> None:
            return None

    account = CudaDeviceAccount(driver, Silent())
    assert account.context == 0
    assert account.other_processes() == GIB + CONTEXT


def test_destroying_the_pool_gives_its_bytes_back():
    driver = ModelDriver()
    account, memory = build(CudaPoolMemoryResource, driver)
    ptr = memory.acquire(100 * MIB, None)
    assert account.taken == 128 * MIB
    memory.release(ptr, 100 * MIB, None)
    memory.close()
    memory.close()
    assert account.taken == 0
    assert driver.reserved == 0
