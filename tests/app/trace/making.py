"""Traces for the tools' tests: written by the real recorder through the real adaptor, or out of events."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
from cuda.core import Buffer
from hypothesis import strategies as st

from app.trace.ndjson import NdjsonTrace, encode
from app.trace.source import open_trace
from app.trace.table import TraceTable, read_table
from engine.memory.errors import OutOfMemoryError, Why
from engine.memory.house import MemoryHouse
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
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


TAGS = ("weights/model.layers.0.mlp", "weights/model.layers.1.mlp", "kv", "repack/a", "io/logits")
SITES = ("engine/model/loader.py:88", "engine/kv_cache.py:12")


@st.composite
def traces(draw: st.DrawFn, *, most: int = 40, least_size: int = 0) -> list[TraceEvent]:
    """What a correct program may record on one device: addresses are used again, some requests fail."""
    events: list[TraceEvent] = []
    live: dict[int, TraceEvent] = {}
    total = sequence = 0
    steps = draw(
        st.lists(st.sampled_from(["alloc", "alloc", "alloc", "free", "free", "fail", "note"]), max_size=most)
    )
    for index, step in enumerate(steps, start=1):
        event = TraceEvent(EventKind.ALLOC, EventState.OK, 0, index=index, api="malloc", thread=7, stream=3)
        if step == "free" and live:
            block = live.pop(draw(st.sampled_from(sorted(live))))
            event.kind, event.sequence, event.pointer = EventKind.FREE, block.sequence, block.pointer
            event.size, event.tag, event.site = block.size, block.tag, block.site
            total -= block.size
        elif step == "note":
            event.kind, event.text = EventKind.NOTE, "said"
        else:
            sequence += 1
            event.sequence = sequence
            event.size = draw(st.integers(least_size, 1 << 26))
            event.tag, event.site = draw(st.sampled_from(TAGS)), draw(st.sampled_from(SITES))
            if step == "fail":
                event.state, event.why, event.text = EventState.FAILED, Why.FULL, "out of memory"
            else:
                event.pointer = next(place for place in range(1 << 44, 1 << 60, 1 << 26) if place not in live)
                live[event.pointer] = event
                total += event.size
        event.live = total
        event.free = (1 << 40) - total
        event.started_ns, event.finished_ns = 5_000 * index, 5_000 * index + 1_000
        event.wall_ns = 1_700_000_000_000_000_000 + event.started_ns
        events.append(event)
    return events
