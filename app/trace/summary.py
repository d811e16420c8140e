"""What a trace says: the failure first, then who asked for how much, and who was live when most was."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from app.trace.lifetimes import Lifetimes, find_lifetimes
from app.trace.table import TraceTable
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["Block", "Group", "Summary", "layer_pattern", "summarize"]


@dataclass(frozen=True, slots=True)
class Group:
    """All requests of one tag, or of one line of code. Sizes are bytes, times nanoseconds."""

    name: str
    allocations: int
    frees: int
    failures: int
    allocated: int
    largest: int
    """largest block"""
    live: int
    """at the end of the trace"""
    at_peak: int
    """live when most was live"""
    median_lifetime: int | None
    """of the blocks that were freed; None if none was"""
    longest_lifetime: int | None


@dataclass(frozen=True, slots=True)
class Block:
    """A block that was live at the peak."""

    sequence: int
    """``#N``"""
    size: int
    tag: str
    site: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A trace in figures. Sizes are bytes."""

    header: TraceHeader
    state: str
    """how the trace ended; empty if the file does not tell"""
    records: int
    missing: int
    """records overwritten or damaged"""
    duration: int
    """nanoseconds from the first request to the last outcome"""
    failure: TraceEvent | None
    """the last request that failed"""
    failures: int
    pending: Sequence[TraceEvent]
    """requests without an outcome: the process ended in them, or they are running"""
    by_tag: Sequence[Group]
    """those with most at the peak first"""
    by_site: Sequence[Group]
    total: Group
    before: int
    """live before the first record held"""
    live: int
    """at the end"""
    peak: int
    peak_sequence: int
    """``#N`` of the allocation that made the peak; 0 if most was live before the first record held"""
    at_peak: Sequence[Block]
    """blocks live then, largest first"""
    at_peak_unknown: int
    """bytes live then of which the trace holds neither the allocation nor the free"""
    bypassed: int
    """bytes that went past the allocator"""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            "device": self.header.device,
            "api": self.header.api,
            "total": self.header.total,
            "state": self.state,
            "records": self.records,
            "missing": self.missing,
            "duration_ns": self.duration,
            "failure": None if self.failure is None else self.failure.to_dict(),
            "failures": self.failures,
            "pending": [event.to_dict() for event in self.pending],
            "peak": self.peak,
            "peak_sequence": self.peak_sequence,
            "live": self.live,
            "before": self.before,
            "bypassed": self.bypassed,
            "all": asdict(self.total),
            "by_tag": [asdict(group) for group in self.by_tag],
            "by_site": [asdict(group) for group in self.by_site],
            "at_peak": [asdict(block) for block in self.at_peak],
            "at_peak_unknown": self.at_peak_unknown,
        }


_LAYER = re.compile(r"(?<![^./])\d+(?![^./])")


def layer_pattern(tag: str) -> str:
    """`tag` with the numbers of its layers as ``*``: ``weights/model.layers.*.mlp.down_proj``."""
    return _LAYER.sub("*", tag)


def summarize(
    table: TraceTable, *, name_of: Callable[[str], str] = layer_pattern, blocks: int = 20
) -> Summary:
    """The summary of a trace.

    Parameters
    ----------
    name_of
        What a tag counts under.
    blocks
        How many of the blocks live at the peak are named.
    """
    lifetimes = find_lifetimes(table)
    peak_row = lifetimes.peak_row
    new, older = lifetimes.live_after(peak_row)
    by_tag = _groups(table, lifetimes, table.tag, [name_of(tag) for tag in table.tags], new, older)
    by_site = _groups(table, lifetimes, table.site, table.sites, new, older)
    total = _groups(table, lifetimes, np.zeros_like(table.tag), ["all"], new, older)
    at_peak = np.concatenate([new, older])
    at_peak = at_peak[np.argsort(-table.size[at_peak], kind="stable")]
    bypasses = (table.kind == EventKind.BYPASS) & (table.outcome == EventState.OK)
    return Summary(
        header=table.header,
        state=table.state,
        records=len(table),
        missing=table.missing,
        duration=_duration(table),
        failure=table.failure,
        failures=table.failures,
        pending=[
            event
            for event in table.remarkable
            if event.kind <= EventKind.FREE and event.state in (EventState.INTENT, EventState.TORN)
        ],
        by_tag=by_tag,
        by_site=by_site,
        total=total[0] if total else Group("all", 0, 0, 0, 0, 0, 0, 0, None, None),
        before=lifetimes.before,
        live=int(lifetimes.live[-1]) if len(table) else 0,
        peak=lifetimes.peak,
        peak_sequence=int(table.sequence[peak_row]) if peak_row >= 0 else 0,
        at_peak=[_block(table, row) for row in at_peak[:blocks]],
        at_peak_unknown=lifetimes.peak - int(table.size[at_peak].sum()),
        bypassed=int(table.size[bypasses].sum()),
    )


def _groups(
    table: TraceTable,
    lifetimes: Lifetimes,
    column: np.ndarray,
    names: Sequence[str],
    new: np.ndarray,
    older: np.ndarray,
) -> list[Group]:
    """Counts of the rows by what `names` has for their places in `column`, most at the peak first."""
    numbers: dict[str, int] = {}
    merged = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    if not len(merged):
        return []
    group = merged[column]
    count = len(numbers)
    allocated, frees = lifetimes.allocated, table.freed
    failed = np.flatnonzero((table.kind == EventKind.ALLOC) & (table.outcome == EventState.FAILED))

    def counts(rows: np.ndarray) -> np.ndarray:
        return np.bincount(group[rows], minlength=count)

    def sums(rows: np.ndarray) -> np.ndarray:
        result = np.zeros(count, np.int64)  # bincount's weights are floats, exact to 2^53 only
        np.add.at(result, group[rows], table.size[rows])
        return result

    alive = allocated[lifetimes.freed == len(table)]
    largest = np.zeros(count, np.int64)
    np.maximum.at(largest, group[allocated], table.size[allocated])
    medians, longest = _lifetimes(table, lifetimes, group, count)
    columns = zip(
        numbers,
        counts(allocated).tolist(),
        counts(frees).tolist(),
        counts(failed).tolist(),
        sums(allocated).tolist(),
        largest.tolist(),
        sums(alive).tolist(),
        (sums(new) + sums(older)).tolist(),
        medians,
        longest,
        strict=True,
    )
    groups = [Group(*values) for values in columns]
    groups = [group for group in groups if group.allocations or group.frees or group.failures]
    return sorted(groups, key=lambda group: (-group.at_peak, -group.allocated, group.name))


def _lifetimes(
    table: TraceTable, lifetimes: Lifetimes, group: np.ndarray, count: int
) -> tuple[list[int | None], list[int | None]]:
    """Median and longest lifetime of each group's freed blocks."""
    medians: list[int | None] = [None] * count
    longest: list[int | None] = [None] * count
    ended = lifetimes.freed < len(table)
    begin, end = lifetimes.allocated[ended], lifetimes.freed[ended]
    lasted = np.maximum(table.started[end] - table.finished[begin], 0)
    owner = group[begin]
    order = np.lexsort((lasted, owner))
    lasted, owner = lasted[order], owner[order]
    bounds = np.searchsorted(owner, np.arange(count + 1))
    for number, (first, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if stop > first:
            medians[number] = int(lasted[(first + stop - 1) // 2])
            longest[number] = int(lasted[stop - 1])
    return medians, longest


def _duration(table: TraceTable) -> int:
    known = table.started[table.started > 0]
    if not len(known):
        return 0
    return max(int(max(known.max(), table.finished.max())) - int(known.min()), 0)


def _block(table: TraceTable, row: int) -> Block:
    return Block(
        int(table.sequence[row]),
        int(table.size[row]),
        table.tags[table.tag[row]],
        table.sites[table.site[row]],
    )
