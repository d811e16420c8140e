"""Which free ends which allocation, and what was live when.

A free names the allocation that it ends by its number, so addresses, which are used again, play no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.trace.table import TraceTable

__all__ = ["Lifetimes", "find_lifetimes", "ordinals"]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Blocks of a trace. Rows are places in its table."""

    allocated: np.ndarray
    """int64, rows of the allocations that succeeded"""
    freed: np.ndarray
    """int64, for each of these the row of its free; the table's length if there is none"""
    older: np.ndarray
    """int64, rows of frees whose allocation is not in the trace: it lies before the first record held"""
    live: np.ndarray
    """int64, for each row the bytes live after it"""
    before: int
    """bytes that were live before the first row"""

    @property
    def peak_row(self) -> int:
        """The first row after which most was live; -1 if nothing rose above `before`."""
        if not len(self.live) or int(self.live.max()) <= self.before:
            return -1
        return int(self.live.argmax())

    @property
    def peak(self) -> int:
        """Most bytes live at once."""
        return max(self.before, int(self.live.max(initial=0)))

    def live_after(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the blocks live after `row`: of their allocations, and of the frees of older blocks."""
        alive = (self.allocated <= row) & (self.freed > row)
        return self.allocated[alive], self.older[self.older > row]


def find_lifetimes(table: TraceTable) -> Lifetimes:
    """Match frees with allocations, and add up what was live."""
    allocated, frees = table.allocated, table.freed
    freed = np.full(len(allocated), len(table), np.int64)
    matched = np.zeros(len(frees), bool)
    # A number is used once in a trace; traces that were put one behind the other use it again, and then the
    # n-th free of a number ends its n-th allocation.
    numbered = np.flatnonzero(table.sequence[allocated])
    order = numbered[np.argsort(table.sequence[allocated[numbered]], kind="stable")]
    numbers = table.sequence[allocated[order]]
    ending = table.sequence[frees]
    place = np.searchsorted(numbers, ending) + ordinals(ending)
    inside = place < len(numbers)
    inside[inside] = numbers[place[inside]] == ending[inside]
    inside &= ending != 0
    target = order[place[inside]]
    early = allocated[target] < frees[inside]
    freed[target[early]] = frees[inside][early]
    matched[np.flatnonzero(inside)[early]] = True

    change = np.zeros(len(table), np.int64)
    change[allocated] = table.size[allocated]
    change[frees] -= table.size[frees]
    running = change.cumsum()
    changed = np.sort(np.concatenate([allocated, frees]))
    before = 0
    if len(changed):
        # Threads may be a little out of order in the record: what most rows agree on is right.
        offsets = np.sort(table.live[changed] - running[changed])
        before = max(int(offsets[len(offsets) // 2]), 0)
    before = max(before, -int(running.min(initial=0)))
    return Lifetimes(allocated, freed, frees[~matched], running + before, before)


def ordinals(keys: np.ndarray) -> np.ndarray:
    """For each element of `keys` how many equal ones are before it."""
    if not len(keys):
        return np.empty(0, np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    lengths = np.diff(np.append(starts, len(keys)))
    result = np.empty(len(keys), np.int64)
    result[order] = np.arange(len(keys)) - np.repeat(starts, lengths)
    return result
