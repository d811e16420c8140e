"""What the memory tests share: a device that can be watched, and ways to stack adaptors over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.memory.base import Overheads, PointerResource
from engine.memory.errors import OutOfMemoryError, UnknownPointerError, Why
from engine.memory.failures import failed_request
from engine.memory.record import TraceHeader
from engine.memory.recorder import FlightRecorder


class WatchedDevice(PointerResource):
    """A device like a GPU: free bytes cost a call, a neighbour may take some, a call can be made to fail.

    It records its own calls, so that tests compare adaptors with what really reached the bottom.
    """

    device = "cuda"
    api = "malloc"
    is_device_accessible = False
    is_host_accessible = False
    device_id = -1

    def __init__(self, total: int = 24 << 30, *, exact: bool = False) -> None:
        self.total = total
        self.exact = exact
        self.neighbours = 0
        self.acquired: list[int] = []
        self.released: list[tuple[int, int]] = []
        self.readings = 0
        self.pool: tuple[int, int] | None = None
        self.retries = 0
        self.fail_next: BaseException | None = None
        self.fail_free: BaseException | None = None
        self.fail_reading: Exception | None = None
        self.before_acquire: Callable[[int], None] = lambda size: None
        self._blocks: dict[int, int] = {}
        self._next = 4096
        self._lock = threading.RLock()

    @property
    def live(self) -> int:
        return sum(self._blocks.values())

    def acquire(self, size: int, stream: Any) -> int:
        self.before_acquire(size)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        with self._lock:
            free = self.total - self.neighbours - self.live
            if size > free:
                raise OutOfMemoryError(
                    failed_request(size, api=self.api, why=Why.FULL, error_code=2, free=free, live=self.live)
                )
            pointer, self._next = self._next, self._next + max(size, 1)
            self._blocks[pointer] = size
            self.acquired.append(size)
        return pointer

    def release(self, ptr: int, size: int, stream: Any) -> None:
        if self.fail_free is not None:
            error, self.fail_free = self.fail_free, None
            raise error
        with self._lock:
            if self._blocks.get(ptr) != size:
                raise UnknownPointerError(ptr, size, self._blocks.get(ptr))
            del self._blocks[ptr]
            self.released.append((ptr, size))

    def read_free(self) -> int:
        self.readings += 1
        if self.fail_reading is not None:
            raise self.fail_reading
        return self.total - self.neighbours - self.live

    def read_pool(self) -> tuple[int, int] | None:
        return self.pool

    def overheads(self) -> Overheads:
        return Overheads(other_processes=self.neighbours)

    def last_retries(self) -> int:
        return self.retries


@pytest.fixture
def device() -> WatchedDevice:
    return WatchedDevice()


@pytest.fixture
def make_device() -> type[WatchedDevice]:
    return WatchedDevice


@pytest.fixture
def recorder() -> FlightRecorder:
    return FlightRecorder.in_memory(TraceHeader(capacity=4096))
