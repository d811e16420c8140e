"""Following a flight recorder's trace while it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from engine.memory.halves import has_outcome
from engine.memory.reader import FlightRecorderReader, TraceSlice
from engine.memory.record import RECORD_DTYPE

__all__ = ["TraceCursor"]


class TraceCursor:
    """A place in a trace, at first index `start`. Each `advance` gives what got its outcome since, once each.

    A request that is still running when it is first seen is kept in mind and delivered when it is done, so
    records may come a little out of order; `index` tells.
    """

    def __init__(self, reader: FlightRecorderReader, start: int = 0) -> None:
        self._reader = reader
        self._next = max(start, 1)
        self._open: set[int] = set()

    @property
    def settled(self) -> int:
        """Everything up to this index has been given, or is lost."""
        return min(self._open, default=self._next) - 1

    @property
    def newest(self) -> int:
        """The newest index seen, with or without an outcome."""
        return self._next - 1

    @property
    def open(self) -> frozenset[int]:
        """Indices of the requests seen without an outcome."""
        return frozenset(self._open)

    def advance(self) -> TraceSlice:
        """What is new. Never waits for the writer."""
        reader = self._reader
        was_open = sorted(self._open)
        pieces: list[np.ndarray] = []
        dropped = torn = 0
        first, _ = reader.held()
        for piece in reader.chunks(self._next, patient=False):
            first, dropped, torn = piece.first, dropped + piece.dropped, torn + piece.torn
            if not len(piece.records):
                continue
            done = has_outcome(piece.records)
            pieces.append(piece.records[done])
            # Open are the requests without an outcome, and the records that are still being written.
            last = int(piece.records["index"][-1])
            self._open.update(range(max(self._next, first), last + 1))
            self._open.difference_update(piece.records["index"][done].tolist())
            self._next = last + 1
        for index in was_open:
            if index < first:
                self._open.discard(index)
                dropped += 1
                continue
            record, _ = reader.between(index, index, patient=False)
            if len(record) and has_outcome(record)[0]:
                self._open.discard(index)
                pieces.append(record)
        records = np.concatenate(pieces) if pieces else np.empty(0, RECORD_DTYPE)
        return TraceSlice(np.sort(records, order="index"), first, dropped, torn)

    def follow(
        self, *, interval: float = 0.1, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TraceSlice]:
        """What is new, again and again until `stop()` is true. Sleeps `interval` seconds in between."""
        while True:
            last = stop()
            piece = self.advance()
            if len(piece.records) or piece.dropped:
                yield piece
            elif last:
                return
            else:
                time.sleep(interval)

    def outstanding(self) -> np.ndarray:
        """The requests seen without an outcome: running, or in the call when the process ended."""
        found = [self._reader.between(index, index)[0] for index in sorted(self._open)]
        return np.concatenate(found) if found else np.empty(0, RECORD_DTYPE)
