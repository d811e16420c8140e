"""Simulated allocators: what requests would cost, and where they would fail, without a device.

`ALLOCATORS` has them by name. They hand out addresses and move no memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.trace.allocators.base import SimulatedAllocator
from app.trace.allocators.malloc import MallocAllocator
from app.trace.allocators.pool import PoolAllocator
from app.trace.allocators.slab import SlabAllocator

__all__ = ["ALLOCATORS", "MallocAllocator", "PoolAllocator", "SimulatedAllocator", "SlabAllocator"]

ALLOCATORS: Mapping[str, type[SimulatedAllocator]] = {
    kind.name: kind for kind in (MallocAllocator, PoolAllocator, SlabAllocator)
}
