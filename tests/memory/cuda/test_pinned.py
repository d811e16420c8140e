"""Page-locked memory against a model of the driver."""

from __future__ import annotations

import pytest

from engine.memory.cuda.device import DeviceHealth
from engine.memory.cuda.pinned import PinnedMemoryResource
from engine.memory.errors import OutOfMemoryError, StickyDeviceError, UnknownPointerError, Why
from tests.memory.cuda.model_driver import ILLEGAL_ADDRESS, MIB, ModelDriver


def test_blocks_come_back_to_zero() -> None:
    driver = ModelDriver()
    memory = PinnedMemoryResource(driver, DeviceHealth())
    ptr = memory.acquire(3 * MIB, None)
    assert memory.live == 3 * MIB
    with pytest.raises(UnknownPointerError):
        memory.release(ptr, MIB, None)
    memory.release(ptr, 3 * MIB, None)
    assert memory.live == 0
    assert not driver.host_blocks


def test_a_host_that_locks_no_more_pages() -> None:
    driver = ModelDriver()
    driver.host_bytes = 4 * MIB
    memory = PinnedMemoryResource(driver, DeviceHealth())
    memory.acquire(3 * MIB, None)
    with pytest.raises(OutOfMemoryError) as caught:
        memory.acquire(2 * MIB, None)
    assert (caught.value.why, caught.value.api, caught.value.live) == (Why.FULL, "pinned", 3 * MIB)
    assert driver.last_error == 0, "the next kernel would be blamed"
    memory.acquire(MIB, None)


def test_nothing_is_asked_after_a_loss() -> None:
    driver = ModelDriver()
    health = DeviceHealth()
    memory = PinnedMemoryResource(driver, health)
    ptr = memory.acquire(MIB, None)
    driver.broken = ILLEGAL_ADDRESS
    with pytest.raises(StickyDeviceError) as caught:
        memory.acquire(MIB, None)
    assert caught.value.why is Why.EARLIER_ERROR
    assert health.lost is not None
    asked = len(driver.calls)
    with pytest.raises(StickyDeviceError):
        memory.acquire(MIB, None)
    memory.release(ptr, MIB, None)
    assert len(driver.calls) == asked
    assert memory.live == 0
