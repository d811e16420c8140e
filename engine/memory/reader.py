"""Reading a flight recorder's file: while it is written, after its writer was killed, whoever wrote it.

The file is read, never mapped: a file that somebody truncates gives an error here and not a signal.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from engine.memory.errors import TraceFileError
from engine.memory.record import (
    ASKED_CRC_AT,
    CLOSED_AT,
    COUNTER_STRUCT,
    HAS_TEXT,
    HEADER_BYTES,
    OUTCOME_AT,
    OUTCOME_CRC_AT,
    RECORD_BYTES,
    RECORD_DTYPE,
    TEXT_AT,
    WRITTEN_AT,
    EventKind,
    EventState,
    TraceEvent,
    TraceHeader,
    events,
)

__all__ = ["FlightRecorderReader", "TraceCursor", "TraceSlice"]

_CHUNK = 8192
_LOOK_AHEAD = 256
_MOST_WRITING = 64
_MOST_INDEX = 1 << 62  # no recorder gets there; a damaged hint may say so
_UNKNOWN_OUTCOME = {
    "live": 0,
    "free": -1,
    "pool_used": -1,
    "pool_reserved": -1,
    "finished_ns": 0,
    "error_code": 0,
    "retries": 0,
    "why": 0,
    "flags": 0,
}


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """Records in the order of their indices, and what is missing among them."""

    records: np.ndarray
    """`RECORD_DTYPE`; `state`, `pointer` and `text` are made good where a half is missing or another lap's"""
    first: int
    """the oldest index that the ring still holds, 1 if nothing was overwritten"""
    dropped: int
    """records asked for that had been overwritten"""
    torn: int
    """records of which not even the first half is whole"""

    def events(self) -> Iterator[TraceEvent]:
        """The records as events, after a GAP event if some were dropped."""
        if self.dropped:
            yield TraceEvent(
                kind=EventKind.GAP,
                state=EventState.OK,
                size=self.dropped,
                text=f"{self.dropped} records were overwritten before they were read",
            )
        yield from events(self.records)


class FlightRecorderReader:
    """A trace, held open. Safe to use while it is written, and from several threads.

    Raises
    ------
    TraceFileError
        On opening: no such file, truncated, of another format or version, damaged. One line that names the
        file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path: Path | None = Path(path)
        self._ring: mmap | None = None
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TraceFileError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.header = self._open(f"{path}")
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> TraceHeader:
        try:
            header = TraceHeader.from_bytes(self._pread(HEADER_BYTES, 0))
            length = os.fstat(self._file).st_size
        except OSError as error:
            raise TraceFileError(f"{name}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise TraceFileError(f"{name}: {error}") from None
        expected = HEADER_BYTES + header.capacity * RECORD_BYTES
        if length != expected:
            raise TraceFileError(
                f"{name}: truncated or overlong: {length} bytes, "
                f"expected {expected} for {header.capacity} records"
            )
        return header

    @classmethod
    def of_ring(cls, ring: mmap) -> Self:
        """A reader of a recorder in this process's own memory."""
        reader = cls.__new__(cls)
        reader.path = None
        reader._ring = ring
        reader._file = -1
        reader.header = TraceHeader.from_bytes(ring[:HEADER_BYTES])
        return reader

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed_ns(self) -> int:
        """Wall clock of the writer's clean end, in nanoseconds since 1970; 0 if it runs, or died."""
        return self._counter(CLOSED_AT)

    @property
    def newest(self) -> int:
        """Index of the newest record; 0 if there is none."""
        return self._held()[1]

    @property
    def replaced(self) -> bool:
        """Whether the path now holds another trace: the writer was started again."""
        if self.path is None:
            return False
        try:
            now, then = os.stat(self.path), os.fstat(self._file)
        except FileNotFoundError:
            return False
        return (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino)

    # -- reading ---------------------------------------------------------------------------------------------

    def records(self, start: int = 0) -> np.ndarray:
        """The records held, from index `start` on, oldest first, intents without an outcome among them."""
        return self.read(start).records

    def read(self, start: int = 0) -> TraceSlice:
        """Like `records`, with what is missing."""
        slices = list(self.chunks(start))
        if not slices:
            first, _ = self._held()
            return TraceSlice(np.empty(0, RECORD_DTYPE), first, 0, 0)
        return TraceSlice(
            np.concatenate([piece.records for piece in slices]),
            slices[-1].first,
            sum(piece.dropped for piece in slices),
            sum(piece.torn for piece in slices),
        )

    def chunks(self, start: int = 0, *, patient: bool = True) -> Iterator[TraceSlice]:
        """Like `read`, a bounded number of records at a time. If not `patient`, a record that is just being
        written counts as torn."""
        first, newest = self._held()
        at = max(start, 1)
        while at <= newest:
            begin = max(at, first)
            if begin > newest:  # all that there was when the reading began is overwritten
                yield TraceSlice(np.empty(0, RECORD_DTYPE), first, newest - at + 1, 0)
                return
            end = min(newest, begin + _CHUNK - 1)
            records, torn = self._range(begin, end, patient=patient)
            # The writer goes on meanwhile: what it overwrote before it was read is missing.
            first = self._held()[0]
            overwritten = max(0, min(first, end + 1) - at)
            dropped = overwritten - int(np.count_nonzero(records["index"] < first))
            yield TraceSlice(records, first, dropped, torn)
            at = end + 1

    def last(self, count: int) -> TraceSlice:
        """The newest `count` records; `dropped` is 0, however many there were before."""
        first, newest = self._held()
        return self.read(max(first, newest - count + 1))

    def cursor(self, start: int = 0) -> TraceCursor:
        """A place in the trace to read on from, at index `start`."""
        return TraceCursor(self, start)

    def follow(
        self, start: int = 0, *, interval: float = 0.1, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[TraceSlice]:
        """Records as they get their outcome, each once, until `stop()` is true. Sleeps `interval` seconds."""
        cursor = self.cursor(start)
        while True:
            last = stop()
            piece = cursor.advance()
            if len(piece.records) or piece.dropped:
                yield piece
            elif last:
                return
            else:
                time.sleep(interval)

    def _held(self) -> tuple[int, int]:
        """The oldest and the newest index in the ring; (1, 0) if it is empty."""
        newest = self._counter(WRITTEN_AT)
        if not self._is_held(newest):
            newest = self._search()
        window = min(_LOOK_AHEAD, self.header.capacity)
        while len(ahead := self._raw(newest + 1, window)[0]):
            newest = int(ahead["index"][-1])
        return max(1, newest - self.header.capacity + 1), newest

    def _is_held(self, index: int) -> bool:
        """Whether the header's hint points at a record, or says that there are none and there are none."""
        if index == 0:
            return not self._slots(0, 1)["index"].any()
        return index < _MOST_INDEX and len(self._range(index, index)[0]) == 1

    def _search(self) -> int:
        """The newest index, without trusting the header's hint."""
        newest = 0
        capacity = self.header.capacity
        for slot in range(0, capacity, _CHUNK):
            raw = self._slots(slot, min(_CHUNK, capacity - slot))
            index = raw["index"]
            placed = (index - 1) % np.uint64(capacity) == np.arange(slot, slot + len(raw), dtype=np.uint64)
            found = index[_whole(raw) & placed & (index < _MOST_INDEX)]
            newest = max(newest, int(found.max(initial=0)))
        return newest

    def _raw(self, begin: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of `count` indices from `begin` (at most one lap): whole records; all slots; which are whole."""
        slot = (begin - 1) % self.header.capacity
        head = min(count, self.header.capacity - slot)
        slots = self._slots(slot, head)
        if head < count:
            slots = np.concatenate([slots, self._slots(0, count - head)])
        good = (slots["index"] == np.arange(begin, begin + len(slots), dtype=np.uint64)) & _whole(slots)
        return slots[good], slots, good

    def _range(self, begin: int, end: int, *, patient: bool = True) -> tuple[np.ndarray, int]:
        """The records among indices begin..end (at most one lap), made good, and how many are torn."""
        records, slots, good = self._raw(begin, end - begin + 1)
        torn = 0
        bad = np.flatnonzero(~good)
        if len(bad):
            # After a clean end, or when they are more than a writer has threads, they are damaged and stay
            # so.
            attempts = 4 if patient and len(bad) <= _MOST_WRITING and not self.closed_ns else 1
            for place in bad:
                again = self._read_again(begin + int(place), attempts)
                if again is None:
                    torn += 1
                elif again["index"][0] == begin + place:
                    slots[place] = again[0]
                    good[place] = True
            records = slots[good]
        _make_good(records)
        return records, torn

    def _read_again(self, index: int, attempts: int) -> np.ndarray | None:
        """The record `index`, or the one that overwrote it; None if it is torn and stays so."""
        slot = (index - 1) % self.header.capacity
        for attempt in range(attempts):
            # A writer needs a microsecond, unless it lost the processor in between.
            time.sleep(0.0003 * attempt)
            raw = self._slots(slot, 1)
            if len(raw) and raw["index"][0] >= index and _whole(raw)[0]:
                return raw
        return None

    def _slots(self, slot: int, count: int) -> np.ndarray:
        data = self._pread(count * RECORD_BYTES, HEADER_BYTES + slot * RECORD_BYTES)
        whole = len(data) // RECORD_BYTES
        return np.frombuffer(bytearray(data[: whole * RECORD_BYTES]), RECORD_DTYPE)

    def _pread(self, length: int, at: int) -> bytes:
        if self._ring is not None:
            return b"" if self._ring.closed else self._ring[at : at + length]
        return os.pread(self._file, length, at)

    def _counter(self, at: int) -> int:
        data = self._pread(8, at)
        return int(COUNTER_STRUCT.unpack(data)[0]) if len(data) == 8 else 0


class TraceCursor:
    """A place in a trace. Each `advance` gives the records that got their outcome since, once each.

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
        first, _ = reader._held()
        for piece in reader.chunks(self._next, patient=False):
            first, dropped, torn = piece.first, dropped + piece.dropped, torn + piece.torn
            if not len(piece.records):
                continue
            done = _has_outcome(piece.records)
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
            record, _ = reader._range(index, index, patient=False)
            if len(record) and _has_outcome(record)[0]:
                self._open.discard(index)
                pieces.append(record)
        records = np.concatenate(pieces) if pieces else np.empty(0, RECORD_DTYPE)
        return TraceSlice(np.sort(records, order="index"), first, dropped, torn)

    def outstanding(self) -> np.ndarray:
        """The requests seen without an outcome: running, or in the call when the process ended."""
        found = [self._reader._range(index, index)[0] for index in sorted(self._open)]
        return np.concatenate(found) if found else np.empty(0, RECORD_DTYPE)


# -- halves ------------------------------------------------------------------------------------------------


def _has_outcome(records: np.ndarray) -> np.ndarray:
    state = records["state"]
    return np.asarray((state == EventState.OK) | (state == EventState.FAILED))


def _whole(slots: np.ndarray) -> np.ndarray:
    """Which slots hold a first half with the right checksum."""
    data = slots.view(np.uint8).data
    crc = zlib.crc32
    computed = [crc(data[at : at + ASKED_CRC_AT]) for at in range(0, len(data), RECORD_BYTES)]
    return np.asarray(slots["asked_crc"] == np.array(computed, np.uint32))


def _make_good(records: np.ndarray) -> None:
    """Set `state` to INTENT or TORN where the outcome is missing or damaged; clear what is another's."""
    data = records.view(np.uint8).data
    crc = zlib.crc32
    states: list[int] = records["state"].tolist()
    mine = (records["outcome_index"] == records["index"]).tolist()
    texts = ((records["flags"] & HAS_TEXT) != 0).tolist()
    for place, expected in enumerate(records["outcome_crc"].tolist()):
        at = place * RECORD_BYTES
        outcome = data[at + OUTCOME_AT : at + OUTCOME_CRC_AT]
        computed = crc(outcome)
        if texts[place]:
            computed = crc(data[at + TEXT_AT : at + RECORD_BYTES], computed)
        if computed != expected:
            # A slot used for the first time is all zeros here.
            states[place] = EventState.TORN if any(outcome) else EventState.INTENT
        elif not mine[place]:
            states[place] = EventState.INTENT
        elif states[place] not in (EventState.OK, EventState.FAILED):
            states[place] = EventState.TORN
    records["state"] = states
    asked_only = ~_has_outcome(records)
    for name, unknown in _UNKNOWN_OUTCOME.items():
        records[name][asked_only] = unknown
    records["pointer"][asked_only] = records["asked_pointer"][asked_only]
    records["text"][(records["flags"] & HAS_TEXT) == 0] = b""
