"""A trace as columns, for analysis: about 70 bytes a record, whatever the records hold."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.trace.source import RecorderTrace, Trace
from engine.memory.errors import TraceFileError
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader, events

__all__ = ["TraceTable", "read_table"]

_MOST_REMARKABLE = 200
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class TraceTable:
    """A whole trace. Columns have one element a record; a row is a place in them."""

    header: TraceHeader
    state: str
    """how the trace ended, as far as the file tells"""
    kind: np.ndarray
    """uint8, `EventKind`"""
    outcome: np.ndarray
    """uint8, `EventState`"""
    sequence: np.ndarray
    """uint64; 0 where a form has none"""
    size: np.ndarray
    """int64, bytes asked for"""
    live: np.ndarray
    """int64, bytes live afterwards as recorded"""
    started: np.ndarray
    """int64, nanoseconds of the monotonic clock"""
    finished: np.ndarray
    """int64"""
    tag: np.ndarray
    """int32, places in `tags`"""
    site: np.ndarray
    """int32, places in `sites`"""
    tags: Sequence[str]
    sites: Sequence[str]
    remarkable: Sequence[TraceEvent]
    """the last failures, requests without an outcome, notes and bypasses, in full"""
    missing: int
    """records that were overwritten or are damaged"""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def failure(self) -> TraceEvent | None:
        """The last request that failed."""
        failed = (
            event
            for event in reversed(self.remarkable)
            if event.kind <= EventKind.FREE and event.state is EventState.FAILED
        )
        return next(failed, None)

    @property
    def failures(self) -> int:
        """Requests that failed."""
        return int(((self.kind <= EventKind.FREE) & (self.outcome == EventState.FAILED)).sum())

    @property
    def allocated(self) -> np.ndarray:
        """Rows of allocations that succeeded."""
        return np.flatnonzero((self.kind == EventKind.ALLOC) & (self.outcome == EventState.OK))

    @property
    def freed(self) -> np.ndarray:
        """Rows of frees that succeeded."""
        return np.flatnonzero((self.kind == EventKind.FREE) & (self.outcome == EventState.OK))


@dataclass(slots=True)
class _Names:
    """Numbers for names, in the order in which they are first seen."""

    numbers: dict[str, int] = field(default_factory=dict)
    _of_bytes: dict[bytes, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def number_bytes(self, name: bytes) -> int:
        known = self._of_bytes.get(name)
        if known is None:
            known = self._of_bytes[name] = self.number(name.decode("utf-8", "replace"))
        return known


_COLUMNS = {
    "kind": np.uint8,
    "outcome": np.uint8,
    "sequence": np.uint64,
    "size": np.int64,
    "live": np.int64,
    "started": np.int64,
    "finished": np.int64,
    "tag": np.int32,
    "site": np.int32,
}
_RECORDED = {"outcome": "state", "started": "started_ns", "finished": "finished_ns"}
"""columns that a record calls otherwise"""


class _Builder:
    def __init__(self) -> None:
        self.pieces: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        self.tags = _Names()
        self.sites = _Names()
        self.remarkable: deque[TraceEvent] = deque(maxlen=_MOST_REMARKABLE)
        self.missing = 0

    def add_records(self, records: np.ndarray) -> None:
        """Add records as a recorder's reader gives them."""
        for name, dtype in _COLUMNS.items():
            if name not in ("tag", "site"):
                self.pieces[name].append(records[_RECORDED.get(name, name)].astype(dtype))
        for name, names in (("tag", self.tags), ("site", self.sites)):
            numbers = [names.number_bytes(data) for data in records[name].tolist()]
            self.pieces[name].append(np.array(numbers, np.int32))
        usual = (records["kind"] == EventKind.ALLOC) | (records["kind"] == EventKind.FREE)
        usual &= records["state"] == EventState.OK
        if not usual.all():
            self.remarkable.extend(events(records[~usual]))

    def add_events(self, found: Iterable[TraceEvent]) -> None:
        """Add events one by one."""
        rows: dict[str, array[int]] = {name: array(np.dtype(dtype).char) for name, dtype in _COLUMNS.items()}
        for event in found:
            if event.kind is EventKind.GAP:
                self.missing += event.size
                continue
            rows["kind"].append(event.kind)
            rows["outcome"].append(event.state)
            rows["sequence"].append(event.sequence)
            rows["size"].append(event.size)
            rows["live"].append(event.live)
            rows["started"].append(event.started_ns)
            rows["finished"].append(event.finished_ns)
            rows["tag"].append(self.tags.number(event.tag))
            rows["site"].append(self.sites.number(event.site))
            if event.state is not EventState.OK or event.kind > EventKind.FREE:
                self.remarkable.append(event)
        for name, dtype in _COLUMNS.items():
            self.pieces[name].append(np.frombuffer(rows[name], dtype) if rows[name] else np.empty(0, dtype))

    def table(self, header: TraceHeader, state: str) -> TraceTable:
        """The table of all that was added. Raises TraceFileError if no device could hold it."""
        columns = {
            name: np.concatenate([np.empty(0, _COLUMNS[name]), *pieces])
            for name, pieces in self.pieces.items()
        }
        size = columns["size"]
        held = size[columns["outcome"] == EventState.OK]
        if (size < 0).any() or float(held.sum(dtype=np.float64)) > _MOST_BYTES:
            raise TraceFileError("the trace is damaged: its sizes are no sizes of blocks")
        return TraceTable(
            header=header,
            state=state,
            tags=list(self.tags.numbers),
            sites=list(self.sites.numbers),
            remarkable=list(self.remarkable),
            missing=self.missing,
            **columns,
        )


def read_table(trace: Trace) -> TraceTable:
    """All of `trace`. Raises TraceFileError if it is damaged."""
    builder = _Builder()
    if isinstance(trace, RecorderTrace):
        # Straight from the file's records: a tenth of the time that events would take.
        for piece in trace.reader.chunks():
            builder.add_records(piece.records)
            builder.missing += piece.dropped + piece.torn
    else:
        builder.add_events(trace.events())
    return builder.table(trace.header, trace.state)
