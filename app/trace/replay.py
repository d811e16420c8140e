"""Replays a trace's requests against a simulated allocator: what they would take, and what would fail."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from app.trace.allocators import SimulatedAllocator
from app.trace.lifetimes import find_lifetimes
from app.trace.table import TraceTable
from engine.memory.errors import OutOfMemoryError, Why
from engine.memory.record import EventKind, EventState

__all__ = ["FailedRequest", "Moment", "Replay", "replay"]


@dataclass(frozen=True, slots=True)
class Moment:
    """How the allocator stood at one request. Sizes are bytes."""

    sequence: int
    """``#N`` of the request; 0: before the first"""
    requested: int
    """live blocks, as they were asked for"""
    used: int
    """the same as they were rounded"""
    reserved: int
    """taken from the device"""

    @property
    def rounding(self) -> int:
        return self.used - self.requested

    @property
    def unused(self) -> int:
        """Reserved, and in no block."""
        return self.reserved - self.used

    @property
    def fragmentation(self) -> float:
        """The part of what is reserved that no block uses, 0 to 1."""
        return self.unused / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed in the replay."""

    sequence: int
    size: int
    tag: str
    site: str
    why: Why
    free: int
    """bytes that no block held, on the device and in the allocator"""
    largest: int
    """the largest request that would have succeeded"""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it."""

    allocator: str
    capacity: int
    granularity: int
    requests: int
    frees: int
    live_peak: Moment
    """when most was asked for"""
    reserved_peak: Moment
    """when most was taken from the device, and of these moments when most was asked for"""
    end: Moment
    failures: int
    """requests that succeeded in the trace and failed here"""
    first_failure: FailedRequest | None
    failed_in_trace: int
    """requests that failed in the trace, or have no outcome there"""
    fit_here: int
    """how many of these would have succeeded here"""
    before: int
    """bytes of blocks that were live before the first record held: the replay begins with them"""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        facts = asdict(self)
        for name, moment in (
            ("live_peak", self.live_peak),
            ("reserved_peak", self.reserved_peak),
            ("end", self.end),
        ):
            facts[name] |= {
                "rounding": moment.rounding,
                "unused": moment.unused,
                "fragmentation": moment.fragmentation,
            }
        if self.first_failure is not None:
            facts["first_failure"]["why"] = self.first_failure.why.value
        return facts


def replay(table: TraceTable, allocator: SimulatedAllocator) -> Replay:
    """Make the requests of `table` to `allocator`, which must be new.

    Blocks that are older than the trace come first: each that is freed in it, and one of all the others,
    whose number nobody knows. A request that failed in the trace, or has no outcome, is made, and given back
    at once if it succeeds: the trace goes on without it. One that fails here is left out from then on.
    """
    return _Replayer(table, allocator).run()


class _Replayer:
    def __init__(self, table: TraceTable, allocator: SimulatedAllocator) -> None:
        self.table = table
        self.allocator = allocator
        self.addresses: dict[int, int] = {}
        """addresses of live blocks, by the row of their allocation; of older ones, by that of their free"""
        self.live_peak = self.reserved_peak = self._moment(0)
        self.first_failure: FailedRequest | None = None
        self.requests = self.frees = self.failures = 0
        self.failed_in_trace = self.fit_here = 0

    def run(self) -> Replay:
        table, lifetimes = self.table, find_lifetimes(self.table)
        for row in lifetimes.older.tolist():
            self._allocate(row, int(table.size[row]))
        others = lifetimes.before - int(table.size[lifetimes.older].sum())
        if others > 0:
            self._allocate(-1, others)
        before = self.allocator.requested
        ends = np.full(len(table), -1, np.int64)
        """for each free the row of its allocation, or its own if that is older than the trace"""
        ended = lifetimes.freed < len(table)
        ends[lifetimes.freed[ended]] = lifetimes.allocated[ended]
        ends[lifetimes.older] = lifetimes.older
        rows = zip(
            table.kind.tolist(), table.outcome.tolist(), table.size.tolist(), ends.tolist(), strict=True
        )
        for row, (kind, outcome, size, end) in enumerate(rows):
            if kind == EventKind.ALLOC:
                self.requests += 1
                if outcome == EventState.OK:
                    self._allocate(row, size)
                else:
                    self._try(row, size)
            elif kind == EventKind.FREE and end >= 0:
                self.frees += 1
                address = self.addresses.pop(end, None)
                if address is not None:
                    self.allocator.free(address)
        allocator = self.allocator
        return Replay(
            allocator=allocator.name,
            capacity=allocator.capacity,
            granularity=allocator.granularity,
            requests=self.requests,
            frees=self.frees,
            live_peak=self.live_peak,
            reserved_peak=self.reserved_peak,
            end=self._moment(int(table.sequence[-1]) if len(table) else 0),
            failures=self.failures,
            first_failure=self.first_failure,
            failed_in_trace=self.failed_in_trace,
            fit_here=self.fit_here,
            before=before,
        )

    def _allocate(self, row: int, size: int) -> None:
        try:
            self.addresses[row] = self.allocator.allocate(size)
        except OutOfMemoryError as error:
            self.failures += 1
            if self.first_failure is None:
                self.first_failure = self._failed(row, size, error)
            return
        self._look(row)

    def _try(self, row: int, size: int) -> None:
        self.failed_in_trace += 1
        try:
            address = self.allocator.allocate(size)
        except OutOfMemoryError:
            return
        self.fit_here += 1
        self._look(row)
        self.allocator.free(address)

    def _look(self, row: int) -> None:
        """Remember the peaks."""
        if self.allocator.requested > self.live_peak.requested:
            self.live_peak = self._moment(self._sequence(row))
        peak = self.reserved_peak
        if (self.allocator.reserved, self.allocator.requested) > (peak.reserved, peak.requested):
            self.reserved_peak = self._moment(self._sequence(row))

    def _moment(self, sequence: int) -> Moment:
        allocator = self.allocator
        return Moment(sequence, allocator.requested, allocator.used, allocator.reserved)

    def _sequence(self, row: int) -> int:
        return int(self.table.sequence[row]) if row >= 0 else 0

    def _failed(self, row: int, size: int, error: OutOfMemoryError) -> FailedRequest:
        table = self.table
        return FailedRequest(
            sequence=self._sequence(row),
            size=size,
            tag=table.tags[table.tag[row]] if row >= 0 else "other",
            site=table.sites[table.site[row]] if row >= 0 else "",
            why=error.why,
            free=self.allocator.free_bytes,
            largest=self.allocator.largest_free,
        )
