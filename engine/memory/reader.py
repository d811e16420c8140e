"""Reading a flight recorder's file: while it is written, after its writer was killed, whoever wrote it.

The file is read, never mapped: a file that somebody truncates gives an error here and not a signal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from engine.memory.errors import TraceFileError
from engine.memory.halves import make_good, whole
from engine.memory.record import (
    CLOSED_AT,
    COUNTER_STRUCT,
    HEADER_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    WRITTEN_AT,
    EventKind,
    EventState,
    TraceEvent,
    TraceHeader,
    events,
)

__all__ = ["FlightRecorderReader", "TraceSlice"]

_CHUNK = 8192
_LOOK_AHEAD = 256
_MOST_WRITING = 64
_MOST_INDEX = 1 << 62  # no recorder gets there; a damaged hint may say so


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
        return self.held()[1]

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
            first, _ = self.held()
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
        first, newest = self.held()
        at = max(start, 1)
        while at <= newest:
            begin = max(at, first)
            if begin > newest:  # all that there was when the reading began is overwritten
                yield TraceSlice(np.empty(0, RECORD_DTYPE), first, newest - at + 1, 0)
                return
            end = min(newest, begin + _CHUNK - 1)
            records, torn = self.between(begin, end, patient=patient)
            # The writer goes on meanwhile: what it overwrote before it was read is missing.
            first = self.held()[0]
            overwritten = max(0, min(first, end + 1) - at)
            dropped = overwritten - int(np.count_nonzero(records["index"] < first))
            yield TraceSlice(records, first, dropped, torn)
            at = end + 1

    def last(self, count: int) -> TraceSlice:
        """The newest `count` records; `dropped` is 0, however many there were before."""
        first, newest = self.held()
        return self.read(max(first, newest - count + 1))

    def held(self) -> tuple[int, int]:
        """The oldest and the newest index in the ring; (1, 0) if it is empty."""
        newest = self._counter(WRITTEN_AT)
        if not self._is_held(newest):
            newest = self._search()
        window = min(_LOOK_AHEAD, self.header.capacity)
        while len(ahead := self._raw(newest + 1, window)[0]):
            newest = int(ahead["index"][-1])
        return max(1, newest - self.header.capacity + 1), newest

    def between(self, begin: int, end: int, *, patient: bool = True) -> tuple[np.ndarray, int]:
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
        make_good(records)
        return records, torn

    def _is_held(self, index: int) -> bool:
        """Whether the header's hint points at a record, or says that there are none and there are none."""
        if index == 0:
            return not self._slots(0, 1)["index"].any()
        return index < _MOST_INDEX and len(self.between(index, index)[0]) == 1

    def _search(self) -> int:
        """The newest index, without trusting the header's hint."""
        newest = 0
        capacity = self.header.capacity
        for slot in range(0, capacity, _CHUNK):
            raw = self._slots(slot, min(_CHUNK, capacity - slot))
            index = raw["index"]
            placed = (index - 1) % np.uint64(capacity) == np.arange(slot, slot + len(raw), dtype=np.uint64)
            found = index[whole(raw) & placed & (index < _MOST_INDEX)]
            newest = max(newest, int(found.max(initial=0)))
        return newest

    def _raw(self, begin: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of `count` indices from `begin` (at most one lap): whole records; all slots; which are whole."""
        slot = (begin - 1) % self.header.capacity
        head = min(count, self.header.capacity - slot)
        slots = self._slots(slot, head)
        if head < count:
            slots = np.concatenate([slots, self._slots(0, count - head)])
        good = (slots["index"] == np.arange(begin, begin + len(slots), dtype=np.uint64)) & whole(slots)
        return slots[good], slots, good

    def _read_again(self, index: int, attempts: int) -> np.ndarray | None:
        """The record `index`, or the one that overwrote it; None if it is torn and stays so."""
        slot = (index - 1) % self.header.capacity
        for attempt in range(attempts):
            # A writer needs a microsecond, unless it lost the processor in between.
            time.sleep(0.0003 * attempt)
            raw = self._slots(slot, 1)
            if len(raw) and raw["index"][0] >= index and whole(raw)[0]:
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
