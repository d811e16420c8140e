"""What one run allocates and another does not.

Addresses and numbers differ from run to run. What stays is which line of code asks for what, and in which
order: so the n-th allocation of a tag from a site in one trace is the n-th of the same in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from app.trace.lifetimes import Lifetimes, find_lifetimes, ordinals
from app.trace.summary import layer_pattern
from app.trace.table import TraceTable
from engine.memory.record import EventKind, TraceEvent

__all__ = ["Change", "Diff", "GroupDiff", "Side", "compare"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two traces in figures. Sizes are bytes."""

    device: str
    requests: int
    allocated: int
    peak: int
    live: int
    """at the end"""
    failures: int
    missing: int
    """records overwritten or damaged: ordinals then begin later, and more may seem to differ than does"""
    failure: TraceEvent | None
    """the last request that failed"""


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation that is not the same in both."""

    tag: str
    site: str
    ordinal: int
    """which of its tag and site, from 1"""
    before: int | None
    """bytes; None: it appeared"""
    after: int | None
    """bytes; None: it vanished"""
    before_sequence: int
    """``#N``; 0 where there is none"""
    after_sequence: int
    kept: bool
    """it was freed, and now is live at the end"""
    released: bool
    """it was live at the end, and now is freed"""

    @property
    def difference(self) -> int:
        return (self.after or 0) - (self.before or 0)


@dataclass(frozen=True, slots=True)
class GroupDiff:
    """The changes of one tag (numbers of layers aside) from one site."""

    tag: str
    site: str
    before: int
    """allocations"""
    after: int
    appeared: int
    vanished: int
    grew: int
    shrank: int
    kept: int
    released: int
    difference: int
    """bytes allocated, after less before"""


@dataclass(frozen=True, slots=True)
class Diff:
    """Two traces compared."""

    before: Side
    after: Side
    groups: list[GroupDiff]
    """those with a change, the largest difference first"""
    changes: list[Change]
    """in the order of tag and site, as they are first seen"""
    same: int
    """allocations that are the same in both"""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        sides = {}
        for name, side in (("before", self.before), ("after", self.after)):
            facts = {field: getattr(side, field) for field in side.__slots__}
            facts["failure"] = None if side.failure is None else side.failure.to_dict()
            sides[name] = facts
        return {
            **sides,
            "same": self.same,
            "groups": [asdict(group) for group in self.groups],
            "changes": [asdict(change) for change in self.changes],
        }


def compare(
    before: TraceTable,
    after: TraceTable,
    *,
    tag_name: Callable[[str], str] = layer_pattern,
    site_name: Callable[[str], str] = str,
) -> Diff:
    """Compare two traces.

    Parameters
    ----------
    tag_name
        What a tag's changes are gathered under; it takes no part in what is matched with what.
    site_name
        What a site is matched by: ``str``, or one that leaves line numbers out, which move with the code.
    """
    sides = (before, after)
    lifetimes = [find_lifetimes(table) for table in sides]
    keys, names = _keys(sides, lifetimes, site_name)
    places = [ordinals(column) for column in keys]
    width = 1 + max((int(column.max()) for column in places if len(column)), default=0)
    marks = [column * width + place for column, place in zip(keys, places, strict=True)]
    _, common_before, common_after = np.intersect1d(
        marks[0], marks[1], assume_unique=True, return_indices=True
    )
    size = [table.size[found.allocated] for table, found in zip(sides, lifetimes, strict=True)]
    sequence = [table.sequence[found.allocated] for table, found in zip(sides, lifetimes, strict=True)]
    freed = [found.freed < len(table) for table, found in zip(sides, lifetimes, strict=True)]

    differ = size[0][common_before] != size[1][common_after]
    differ |= freed[0][common_before] != freed[1][common_after]
    changes = []
    for one, other in zip(common_before[differ].tolist(), common_after[differ].tolist(), strict=True):
        changes.append((int(marks[0][one]), one, other))
    only_before = np.setdiff1d(np.arange(len(marks[0])), common_before, assume_unique=True)
    only_after = np.setdiff1d(np.arange(len(marks[1])), common_after, assume_unique=True)
    changes += [(int(marks[0][one]), one, -1) for one in only_before.tolist()]
    changes += [(int(marks[1][other]), -1, other) for other in only_after.tolist()]

    found = []
    for mark, one, other in sorted(changes):
        tag, site = names[mark // width]
        was_freed, is_freed = one >= 0 and bool(freed[0][one]), other >= 0 and bool(freed[1][other])
        both = one >= 0 and other >= 0
        found.append(
            Change(
                tag=tag,
                site=site,
                ordinal=mark % width + 1,
                before=int(size[0][one]) if one >= 0 else None,
                after=int(size[1][other]) if other >= 0 else None,
                before_sequence=int(sequence[0][one]) if one >= 0 else 0,
                after_sequence=int(sequence[1][other]) if other >= 0 else 0,
                kept=both and was_freed and not is_freed,
                released=both and is_freed and not was_freed,
            )
        )
    counts = [np.bincount(column, minlength=len(names)) for column in keys]
    return Diff(
        before=_side(before, lifetimes[0]),
        after=_side(after, lifetimes[1]),
        groups=_groups(found, names, counts, tag_name),
        changes=found,
        same=len(common_before) - int(differ.sum()),
    )


_Names = list[tuple[str, str]]


def _keys(
    sides: tuple[TraceTable, TraceTable], lifetimes: list[Lifetimes], site_name: Callable[[str], str]
) -> tuple[list[np.ndarray], _Names]:
    """For each allocation of each trace the number of its tag and site, which both share; and their names."""
    tags: dict[str, int] = {}
    sites: dict[str, int] = {}
    pairs = []
    for table, found in zip(sides, lifetimes, strict=True):
        tag = np.array([tags.setdefault(name, len(tags)) for name in table.tags], np.int64)
        site = np.array([sites.setdefault(site_name(name), len(sites)) for name in table.sites], np.int64)
        rows = found.allocated
        pairs.append((tag[table.tag[rows]] << 32) | site[table.site[rows]])
    both = np.concatenate(pairs)
    distinct, first, inverse = np.unique(both, return_index=True, return_inverse=True)
    # In the order in which they are first seen, so that a reader finds the order of the load.
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    numbers = rank[inverse]
    tag_names, site_names = list(tags), list(sites)
    names = [(tag_names[key >> 32], site_names[key & 0xFFFFFFFF]) for key in distinct[order].tolist()]
    return [numbers[: len(pairs[0])], numbers[len(pairs[0]) :]], names


def _groups(
    changes: list[Change], names: _Names, counts: list[np.ndarray], tag_name: Callable[[str], str]
) -> list[GroupDiff]:
    sums: dict[tuple[str, str], list[int]] = {}
    for change in changes:
        key = (tag_name(change.tag), change.site)
        row = sums.setdefault(key, [0] * 7)
        row[0] += change.before is None
        row[1] += change.after is None
        if change.before is not None and change.after is not None:
            row[2] += change.difference > 0
            row[3] += change.difference < 0
        row[4] += change.kept
        row[5] += change.released
        row[6] += change.difference
    totals = {key: [0, 0] for key in sums}
    for place, (tag, site) in enumerate(names):
        total = totals.get((tag_name(tag), site))
        if total is not None:
            total[0] += int(counts[0][place])
            total[1] += int(counts[1][place])
    groups = [GroupDiff(*key, *totals[key], *row) for key, row in sums.items()]
    return sorted(groups, key=lambda group: -abs(group.difference))


def _side(table: TraceTable, lifetimes: Lifetimes) -> Side:
    return Side(
        device=table.header.device,
        requests=int((table.kind == EventKind.ALLOC).sum()),
        allocated=int(table.size[lifetimes.allocated].sum()),
        peak=lifetimes.peak,
        live=int(lifetimes.live[-1]) if len(table) else 0,
        failures=table.failures,
        missing=table.missing,
        failure=table.failure,
    )
