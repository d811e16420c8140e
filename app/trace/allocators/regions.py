"""Regions of addresses in which blocks are placed side by side, best fit, and free neighbours become one."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Regions"]


class Regions:
    """Free and used pieces of regions. A region is contiguous; regions are not neighbours of each other."""

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []
        """size and start of each free piece, sorted"""
        self._starts: dict[int, int] = {}
        """end of each free piece by its start"""
        self._ends: dict[int, int] = {}
        """start of each free piece by its end"""
        self._regions: dict[int, int] = {}
        """end of each region by its start"""

    def add(self, start: int, size: int) -> None:
        """A new region, free. It may begin where another ends, and then makes that one longer."""
        self._regions[start] = start + size
        self.give(start, size)

    def extend(self, start: int, size: int) -> None:
        """Make the region at `start` longer by `size` free bytes."""
        end = self._regions[start]
        self._regions[start] = end + size
        self.give(end, size)

    def free_at_end(self, start: int) -> int:
        """Free bytes at the end of the region at `start`."""
        end = self._regions[start]
        return end - self._ends.get(end, end)

    def take(self, size: int) -> int | None:
        """Address of `size` bytes out of the smallest free piece that has them (of those, the first)."""
        place = bisect_left(self._sizes, (size, 0))
        if place == len(self._sizes):
            return None
        length, start = self._sizes.pop(place)
        del self._starts[start], self._ends[start + length]
        if length > size:
            self._insert(start + size, length - size)
        return start

    def give(self, start: int, size: int) -> tuple[int, int]:
        """Make `size` bytes at `start` free, as one piece with free neighbours: its start and size."""
        end = start + size
        before = self._ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._starts.get(end)
        if after is not None:
            self._remove(end, after - end)
            end = after
        self._insert(start, end - start)
        return start, end - start

    def drop(self, start: int) -> int:
        """Forget the region at `start`, which is free: the bytes that it had."""
        size = self._regions.pop(start) - start
        self._remove(start, size)
        return size

    def is_free(self, start: int) -> bool:
        """Whether there is a region at `start`, and nothing in it."""
        end = self._regions.get(start)
        return end is not None and self._starts.get(start) == end

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        return self._sizes[-1][0] if self._sizes else 0

    def _insert(self, start: int, size: int) -> None:
        insort(self._sizes, (size, start))
        self._starts[start] = start + size
        self._ends[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, start))]
        del self._starts[start], self._ends[start + size]
