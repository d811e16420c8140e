"""Traces for the tools' tests: written by the real recorder through the real adaptor, or out of events."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
from cuda.core import Buffer

from app.trace.ndjson import NdjsonTrace, encode
from app.trace.source import open_trace
from app.trace.table import TraceTable, read_table
from engine.memory.errors import OutOfMemoryError
from engine.memory.house import MemoryHouse
from engine.memory.record import TraceEvent, TraceHeader
from engine.memory.resources import PlanningMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings

MIB = 1 << 20


class TraceMaker:
    """Allocates under tags on a device of `capacity` bytes, and leaves a trace in `path`."""

    def __init__(self, path: Path, *, capacity: int = 1 << 40, records: int = 4096) -> None:
        self.path = path
        self.house = MemoryHouse.build(
            PlanningMemoryResource(capacity), TraceSettings(trace=True, file=path, records=records)
        )
        self.buffers: dict[str, Buffer] = {}

    def allocate(self, name: str, size: int, tag: str = "other") -> None:
        with memory_scope(tag):
            self.buffers[name] = self.house.resource.allocate(size)

    def elsewhere(self, name: str, size: int, tag: str = "other") -> None:
        """The same, from another line of code."""
        with memory_scope(tag):
            self.buffers[name] = self.house.resource.allocate(size)

    def fail(self, size: int, tag: str = "other") -> None:
        with memory_scope(tag), pytest.raises(OutOfMemoryError):
            self.house.resource.allocate(size)

    def free(self, *names: str) -> None:
        for name in names:
            self.buffers.pop(name).close()

    def close(self) -> Path:
        """End the trace; what is live stays live in it."""
        self.house.close()
        return self.path


def table_of(path: Path) -> TraceTable:
    """The trace in a file."""
    with open_trace(path) as trace:
        return read_table(trace)


def events_of(path: Path) -> list[TraceEvent]:
    """The records of a file."""
    with open_trace(path) as trace:
        return list(trace.events())


def table_of_events(events: Sequence[TraceEvent]) -> TraceTable:
    """A trace out of events."""
    data = b"".join(encode(events, TraceHeader(capacity=1)))
    return read_table(NdjsonTrace.open("events", BytesIO(data)))
