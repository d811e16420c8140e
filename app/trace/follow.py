"""Follows a flight recorder's file until the process that writes it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

from app.trace.source import RecorderTrace, writer_of
from engine.memory.cursor import TraceCursor
from engine.memory.record import TraceEvent, events

__all__ = ["follow_trace"]

_INTERVAL_SECONDS = 0.1


def follow_trace(trace: RecorderTrace, last: int | None) -> Iterator[list[TraceEvent]]:
    """Records as they get their outcome, from the newest `last` on (None: from the oldest).

    Ends when the writer has closed the file, has ended, or has begun another trace; requests that it left
    without an outcome come last.
    """
    reader = trace.reader
    cursor = TraceCursor(reader, 0 if last is None else max(reader.newest - last + 1, 0))
    while True:
        # Asked first: what was written before the end is then found by this look, or the next.
        ended = bool(reader.closed_ns) or reader.replaced or not writer_of(reader.header)
        piece = cursor.advance()
        if len(piece.records) or piece.dropped:
            yield list(piece.events())
        elif ended:
            break
        else:
            time.sleep(_INTERVAL_SECONDS)
    yield list(events(cursor.outstanding()))
