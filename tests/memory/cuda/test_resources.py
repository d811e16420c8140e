"""The CUDA resources against a model of the driver that behaves as one was measured to."""

from __future__ import annotations

import pytest

from engine.memory.adaptors import LimitingMemoryResource
from engine.memory.cuda.device import CudaDeviceAccount
from engine.memory.cuda.resources import CudaMallocMemoryResource, CudaPoolMemoryResource, account_of
from engine.memory.cuda.runtime import OUT_OF_MEMORY, CudaCallError, is_sticky
from engine.memory.errors import OutOfMemoryError, StickyDeviceError, Why
from engine.memory.resources import HostMemoryResource
from tests.memory.cuda.model_driver import (
    CONTEXT,
    GIB,
    ILLEGAL_ADDRESS,
    MIB,
    ModelDriver,
    ModelUsage,
)


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


def test_a_loss_found_by_reading_is_known_to_all_who_share_the_device(kind):
    """cudaMalloc may give memory after a kernel's illegal access; cudaMemGetInfo says what happened."""
    driver = ModelDriver()
    account, memory = build(kind, driver)
    other = CudaMallocMemoryResource(account, driver)
    ptr = memory.acquire(MIB, None)
    driver.broken = ILLEGAL_ADDRESS
    with pytest.raises(CudaCallError):
        memory.read_free()
    asked = len(driver.calls)
    for resource in (memory, other):
        with pytest.raises(StickyDeviceError, match="nothing was asked of CUDA"):
            resource.acquire(MIB, None)
    memory.release(ptr, MIB, None)
    assert len(driver.calls) == asked


def test_a_block_that_was_given_stays_given_when_the_pool_cannot_be_read():
    driver = ModelDriver()
    _, memory = build(CudaPoolMemoryResource, driver)
    driver.pool_bytes = lambda pool: driver.fail("cudaMemPoolGetAttribute", ILLEGAL_ADDRESS)
    memory.acquire(MIB, None)
    assert memory.live == MIB
    with pytest.raises(StickyDeviceError):
        memory.acquire(MIB, None)


def test_the_account_is_found_under_adaptors(kind):
    account, memory = build(kind, ModelDriver())
    assert account_of(LimitingMemoryResource(memory, GIB)) is account
    assert account_of(HostMemoryResource(GIB)) is None


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


def test_a_step_within_a_step_is_counted_once():
    driver = ModelDriver()
    account, _ = build(CudaMallocMemoryResource, driver)
    with account.library_step():
        driver.neighbours += 16 * MIB
        with account.library_step():
            driver.neighbours += 32 * MIB
    assert account.library == 48 * MIB
    with account.library_step():
        driver.neighbours += 2 * MIB
    assert account.library == 50 * MIB


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
