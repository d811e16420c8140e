"""A stream-ordered pool (cudaMallocAsync), as it was measured on an H200 with driver 580.

A request gets the smallest free piece that is large enough, at a multiple of 512, and the rest of that piece
stays free. If there is none the pool grows, in steps of 32 MiB, by what the free bytes at its end lack. It
keeps what it has.

A request that fails makes a real pool take all that is free on the device, until it is trimmed. Here it
changes nothing.
"""

from __future__ import annotations

from app.trace.allocators.base import ALIGNMENT, SimulatedAllocator, round_up
from app.trace.allocators.regions import Regions

__all__ = ["PoolAllocator"]

_START = 1 << 44


class PoolAllocator(SimulatedAllocator):
    """A best-fit pool that grows and keeps."""

    name = "pool"
    standard_granularity = 32 << 20

    def __init__(self, capacity: int, granularity: int | None = None) -> None:
        super().__init__(capacity, granularity)
        self._pieces = Regions()
        self._next_address = 1 << 60  # for blocks of no bytes, far from the pool

    @property
    def largest_free(self) -> int:
        return max(self._pieces.largest, self._free_at_end + self._unreserved)

    @property
    def _free_at_end(self) -> int:
        return self._pieces.free_at_end(_START) if self.reserved else 0

    def _place(self, size: int) -> tuple[int, int] | None:
        cost = round_up(size, ALIGNMENT)
        address = self._pieces.take(cost)
        if address is None and self._grow(cost):
            address = self._pieces.take(cost)
        return None if address is None else (address, cost)

    def _grow(self, cost: int) -> bool:
        begun = self.reserved > 0
        growth = round_up(cost - self._free_at_end, self.granularity)
        if not self._reserve(growth):
            return False
        if begun:
            self._pieces.extend(_START, growth)
        else:
            self._pieces.add(_START, growth)
        return True

    def _remove(self, address: int, cost: int) -> None:
        self._pieces.give(address, cost)
