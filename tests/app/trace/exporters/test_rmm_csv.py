"""The log has RMM's columns, and what its readers make of it is what was live."""

from __future__ import annotations

import csv
import datetime
import re

from hypothesis import given

from app.trace.exporters import EXPORTERS
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from tests.app.trace.making import traces


def rows(events: list[TraceEvent]) -> list[dict[str, str]]:
    data = b"".join(EXPORTERS["rmm-csv"].encode(events, TraceHeader(capacity=1)))
    return list(csv.DictReader(data.decode().splitlines(), strict=True))


def test_a_line_of_each_kind() -> None:
    alloc = TraceEvent(EventKind.ALLOC, EventState.OK, 1024, pointer=0x30A000000, thread=1979932, stream=2)
    alloc.wall_ns = int(datetime.datetime(2026, 5, 4, 14, 21, 19, tzinfo=datetime.UTC).timestamp()) * 10**9
    alloc.wall_ns += 998_533_999
    failed = TraceEvent(EventKind.ALLOC, EventState.FAILED, 5, pointer=9)
    pending = TraceEvent(EventKind.ALLOC, EventState.INTENT, 5)
    note = TraceEvent(EventKind.NOTE, EventState.OK, 0, text="one, two")
    free = TraceEvent(EventKind.FREE, EventState.OK, 1024, pointer=0x30A000000, thread=1980043)
    data = b"".join(
        EXPORTERS["rmm-csv"].encode([alloc, failed, pending, note, free], TraceHeader(capacity=1))
    )
    assert data.decode().splitlines() == [
        "Thread,Time,Action,Pointer,Size,Stream",
        "1979932,14:21:19.998533,allocate,0x30a000000,1024,2",
        "0,00:00:00.000000,allocate failure,0x0,5,0",
        "1980043,00:00:00.000000,free,0x30a000000,1024,0",
    ]


@given(traces())
def test_what_is_live_can_be_computed_from_it(events: list[TraceEvent]) -> None:
    """As RMM's scripts do: add what is allocated, subtract what is freed; a free's pointer was allocated."""
    live: dict[int, int] = {}
    found = []
    for row in rows(events):
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{6}", row["Time"])
        pointer, size = int(row["Pointer"], 16), int(row["Size"])
        if row["Action"] == "allocate":
            live[pointer] = size
        elif row["Action"] == "free":
            assert live.pop(pointer) == size
        else:
            assert row["Action"] == "allocate failure"
        found.append(sum(live.values()))
    assert found == [event.live for event in events if event.kind is not EventKind.NOTE]
