"""A memory resource over a simulated allocator, so that the real tracing adaptor can record it."""

from __future__ import annotations

from typing import Any

from app.trace.allocators import SimulatedAllocator
from app.trace.source import RecorderTrace
from app.trace.table import TraceTable, read_table
from engine.memory.base import Overheads, PointerResource
from engine.memory.house import MemoryHouse
from engine.memory.settings import TraceSettings


class SimulatedResource(PointerResource):
    """Asks `allocator`, and reads the device off it."""

    device = "cuda"
    api = "plan"
    exact = True
    is_device_accessible = False
    is_host_accessible = False
    device_id = -1

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self.allocator = allocator
        self.peak_requested = 0
        self.peak_reserved = 0

    @property
    def total(self) -> int:
        return self.allocator.capacity

    def acquire(self, size: int, stream: Any) -> int:
        address = self.allocator.allocate(size)
        self.peak_requested = max(self.peak_requested, self.allocator.requested)
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved)
        return address

    def release(self, ptr: int, size: int, stream: Any) -> None:
        self.allocator.free(ptr)

    def read_free(self) -> int:
        return self.allocator.capacity - self.allocator.reserved

    def read_pool(self) -> tuple[int, int] | None:
        return None

    def overheads(self) -> Overheads:
        return Overheads()

    def last_retries(self) -> int:
        return 0


def traced(resource: SimulatedResource, *, records: int = 4096) -> MemoryHouse:
    """`resource` under the trace, recorded in memory."""
    return MemoryHouse.build(resource, TraceSettings(trace=True, records=records))


def table_of_house(house: MemoryHouse) -> TraceTable:
    """What `house` recorded."""
    assert house.recorder is not None
    return read_table(RecorderTrace(house.recorder.reader()))
