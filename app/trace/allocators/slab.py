"""Slabs for small tensors: blocks under 1 MiB share steps with blocks of their own size class.

Classes are four to a power of two, so that rounding costs a fifth at most. A slab is one step; it is given
back when its last block is freed. A class that has no place left, on a device that has no step left, uses the
next larger one's. Larger blocks have whole steps for themselves, as with cudaMalloc. No hole fits nobody:
every free place of a slab fits the next block of its class.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.trace.allocators.base import ALIGNMENT, SimulatedAllocator, round_up

__all__ = ["SlabAllocator", "size_class"]

_SMALL = 1 << 20


def size_class(size: int) -> int:
    """Bytes of the class of `size`: 512, 1024, then 1.25, 1.5, 1.75 and 2 times powers of two."""
    if size <= 2 * ALIGNMENT:
        return round_up(size, ALIGNMENT)
    power = 1 << ((size - 1).bit_length() - 1)
    return round_up(size, max(power // 4, ALIGNMENT))


@dataclass(slots=True, eq=False)
class _Slab:
    """One step, cut into places of one size."""

    place: int
    """bytes of a place"""
    start: int
    end: int
    fresh: int
    """address from which on no place was used yet"""
    returned: list[int] = field(default_factory=list)
    """places that were used and are free"""
    live: int = 0

    @property
    def is_full(self) -> bool:
        return not self.returned and self.fresh + self.place > self.end

    def take(self) -> int:
        self.live += 1
        if self.returned:
            return self.returned.pop()
        self.fresh += self.place
        return self.fresh - self.place


class SlabAllocator(SimulatedAllocator):
    """Slabs for what is under 1 MiB, whole steps for the rest."""

    name = "slab"
    standard_granularity = 2 << 20

    def __init__(self, capacity: int, granularity: int | None = None) -> None:
        super().__init__(capacity, granularity)
        self._small = min(_SMALL, self.granularity)
        self._open: dict[int, dict[int, _Slab]] = {}
        """slabs with free places, by class and start"""
        self._slab_of: dict[int, _Slab] = {}
        """the slab of each small block"""

    @property
    def largest_free(self) -> int:
        return max(self._unreserved, max((size for size, slabs in self._open.items() if slabs), default=0))

    def _place(self, size: int) -> tuple[int, int] | None:
        cost = size_class(size)
        if cost >= self._small:
            cost = round_up(size, self.granularity)
            return (self._new_addresses(cost), cost) if self._reserve(cost) else None
        slabs = self._open.setdefault(cost, {})
        if not slabs:
            if self._reserve(self.granularity):
                start = self._new_addresses(self.granularity)
                slabs[start] = _Slab(cost, start, start + self.granularity, start)
            else:  # rather waste a place than fail
                larger = [place for place, others in self._open.items() if others and place > cost]
                if not larger:
                    return None
                slabs = self._open[min(larger)]
        slab = slabs[min(slabs)]  # the oldest first, so that younger ones become empty
        address = slab.take()
        if slab.is_full:
            del slabs[slab.start]
        self._slab_of[address] = slab
        return address, slab.place

    def _remove(self, address: int, cost: int) -> None:
        if cost >= self._small:
            self.reserved -= cost
            return
        slab = self._slab_of.pop(address)
        slabs = self._open[slab.place]
        slab.returned.append(address)
        slab.live -= 1
        if slab.live:
            slabs[slab.start] = slab
        else:
            slabs.pop(slab.start, None)
            self.reserved -= self.granularity
