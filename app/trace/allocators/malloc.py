"""cudaMalloc, as it was measured on an H200 with driver 580.

It takes the device in steps of 2 MiB. A request of 1 MiB and less shares a step with others: it gets the
smallest free piece of a shared step that has room for it, at a multiple of 512. A larger request has whole
steps for itself, wherever they are free. A step is given back when its last block is freed.
"""

from __future__ import annotations

from app.trace.allocators.base import ALIGNMENT, SimulatedAllocator, round_up
from app.trace.allocators.regions import Regions

__all__ = ["MallocAllocator"]


class MallocAllocator(SimulatedAllocator):
    """Whole steps for the large, shared steps for the small."""

    name = "malloc"
    standard_granularity = 2 << 20

    def __init__(self, capacity: int, granularity: int | None = None) -> None:
        super().__init__(capacity, granularity)
        self._shared = Regions()

    @property
    def largest_free(self) -> int:
        return max(self._unreserved, min(self._shared.largest, self.granularity // 2))

    def _place(self, size: int) -> tuple[int, int] | None:
        if size > self.granularity // 2:
            cost = round_up(size, self.granularity)
            return (self._new_addresses(cost), cost) if self._reserve(cost) else None
        cost = round_up(size, ALIGNMENT)
        address = self._shared.take(cost)
        if address is None:
            if not self._reserve(self.granularity):
                return None
            self._shared.add(self._new_addresses(self.granularity), self.granularity)
            address = self._shared.take(cost)
            assert address is not None
        return address, cost

    def _remove(self, address: int, cost: int) -> None:
        if cost > self.granularity // 2:
            self.reserved -= cost
            return
        start, _ = self._shared.give(address, cost)
        if self._shared.is_free(start):
            self.reserved -= self._shared.drop(start)
