"""Follows the flight recorder's file for any number of readers at the cost of one.

The engine only writes its file. Here one reader at a time looks for what is new, decodes it once, and all
find it. Who reads too slowly loses the oldest pieces, and is told how many records those were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import anyio.to_thread

from engine.memory.cursor import TraceCursor
from engine.memory.errors import TraceFileError
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import EventKind, EventState, TraceEvent, events

__all__ = ["Piece", "Position", "TracePath", "TraceStream", "read_recent"]

_INTERVAL = 0.1
_KEPT_EVENTS = 16_384
_LOOK_BACK = 4_096
"""records before the newest among which a request may still be running"""


class TracePath(Protocol):
    """Where the trace is. It is another file after each start of an engine, under the same name."""

    @property
    def trace_path(self) -> Path | None:
        """The flight recorder's file; None while tracing is off."""


class Position(NamedTuple):
    """A place to go on from: everything up to `record` has been read of the trace that began at `created`."""

    created: int
    """nanoseconds since 1970"""
    record: int

    @classmethod
    def parse(cls, text: str) -> Position | None:
        """What `str` gave; None if it is something else."""
        created, _, index = text.strip().partition("-")
        try:
            return cls(int(created, 16), int(index))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.created:x}-{self.record}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Records that got their outcome."""

    events: list[TraceEvent]
    device: str
    created: int
    settled: int
    """everything up to this index has been given"""
    begins: bool = False
    """the trace of an engine that was started meanwhile begins here"""

    def position(self, event: TraceEvent) -> Position:
        """Where to go on from after `event`: a record may come again, but none is missed."""
        return Position(self.created, min(event.index or self.settled, self.settled))


def gap(count: int, text: str) -> TraceEvent:
    """Stands for records that cannot be had any more; `count` is 0 if nobody knows how many."""
    return TraceEvent(kind=EventKind.GAP, state=EventState.OK, size=count, text=text)


def read_recent(path: Path, count: int | None) -> Piece:
    """The newest `count` records of the trace at `path`; None: all that are held.

    Raises
    ------
    TraceFileError
        There is no trace.
    """
    with FlightRecorderReader(path) as reader:
        piece = reader.read() if count is None else reader.last(count)
        found = list(events(piece.records))
        last = found[-1].index if found else 0
        running = [event.index for event in found if event.state is EventState.INTENT]
        return Piece(
            found, reader.header.device, reader.header.created_wall_ns, min([*running, last + 1]) - 1
        )


@dataclass(slots=True, eq=False)
class _Follower:
    """What one reader of the stream has seen beyond the shared pieces."""

    created: int = 0
    newest: int = 0
    running: set[int] = field(default_factory=set)
    """requests that it saw without an outcome"""

    def unseen(self, piece: Piece) -> list[TraceEvent]:
        if piece.created != self.created:
            self.created, self.newest, self.running = piece.created, 0, set()
        fresh = [event for event in piece.events if event.index > self.newest or event.index in self.running]
        self.running.difference_update(event.index for event in fresh)
        return fresh


class TraceStream:
    """The trace of `source`, as it grows."""

    def __init__(self, source: TracePath, *, interval: float = _INTERVAL, keep: int = _KEPT_EVENTS) -> None:
        self._source = source
        self._interval = interval
        self._keep = keep
        self._lock = anyio.Lock()
        self._pieces: deque[Piece] = deque()
        self._count = 0
        """pieces there have been"""
        self._held = 0
        """events in `_pieces`"""
        self._reader: FlightRecorderReader | None = None
        self._cursor: TraceCursor | None = None

    async def follow(
        self, start: Position | None, last: int, *, keep_alive: float
    ) -> AsyncGenerator[Piece | None, None]:
        """Pieces from `start` on, or from the newest `last` records; what is lost comes as a GAP event.

        None stands for `keep_alive` seconds of silence.
        """
        await self._prime()
        count = self._count
        follower = _Follower()
        for piece in await anyio.to_thread.run_sync(self._begin, follower, start, last):
            yield piece
        while True:
            with anyio.move_on_after(keep_alive) as waited:
                await self._wait_for(count)
            if waited.cancelled_caught and self._count <= count:
                yield None
                continue
            oldest = self._count - len(self._pieces)
            lost = count < oldest
            for piece in list(self._pieces)[max(count - oldest, 0) :]:
                found = follower.unseen(piece)
                if lost:
                    missing = max(piece.events[0].index - follower.newest - 1, 0) if piece.events else 0
                    found.insert(0, gap(missing, f"{missing} records were not read in time"))
                    lost = False
                if piece.events:
                    follower.newest = max(follower.newest, piece.events[-1].index)
                if found or piece.begins:
                    yield Piece(found, piece.device, piece.created, piece.settled, piece.begins)
            count = self._count

    def _begin(self, follower: _Follower, start: Position | None, last: int) -> list[Piece]:
        """What a new follower has not seen, up to now."""
        path = self._source.trace_path
        if path is None:
            return []
        pieces: list[Piece] = []
        try:
            with FlightRecorderReader(path) as reader:
                created = reader.header.created_wall_ns
                begin, lost = 0, list[TraceEvent]()
                if start is None:
                    begin = max(reader.newest - last + 1, 0)
                elif start.created != created:
                    pieces.append(_rest_of_previous(path, start))
                else:
                    place, lost = _place(reader, start)
                    begin = place + 1
                cursor = TraceCursor(reader, begin)
                piece = cursor.advance()
                found = [*lost, *piece.events()]
                follower.created, follower.newest = created, cursor.newest
                follower.running = set(cursor.open)
                begins = start is not None and start.created != created
                pieces.append(Piece(found, reader.header.device, created, cursor.settled, begins))
        except TraceFileError:
            pass  # the engine has not come so far
        return pieces

    # -- one for all ---------------------------------------------------------------------------------------

    async def _prime(self) -> None:
        """Know which requests are running before somebody reads what there is."""
        async with self._lock:
            if self._reader is None:
                await anyio.to_thread.run_sync(self._open_at_end)

    async def _wait_for(self, count: int) -> None:
        """Return when there is a piece beyond the first `count`. Whoever comes first looks, for all."""
        while self._count <= count:
            async with self._lock:
                if self._count > count:
                    return
                found = [] if self._is_quiet() else await anyio.to_thread.run_sync(self._poll)
                for piece in found:
                    self._add(piece)
                if not found:
                    await anyio.sleep(self._interval)

    def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._count += 1
        self._held += len(piece.events)
        while self._held > self._keep and len(self._pieces) > 1:
            self._held -= len(self._pieces.popleft().events)

    def _open_at_end(self) -> None:
        """Begin behind what there is, which every follower reads by itself."""
        if self._open():
            assert self._reader is not None
            self._cursor = TraceCursor(self._reader, max(self._reader.newest - _LOOK_BACK, 0))
            self._cursor.advance()

    def _open(self) -> bool:
        path = self._source.trace_path
        if path is None:
            return False
        try:
            self._reader = FlightRecorderReader(path)
        except TraceFileError:  # the engine has not come so far
            return False
        self._cursor = TraceCursor(self._reader)
        return True

    def _is_quiet(self) -> bool:
        """Nothing is new. Most of the time that is so, and knowing it takes no thread."""
        reader, cursor = self._reader, self._cursor
        if reader is None or cursor is None or cursor.open:
            return False
        try:
            return reader.newest <= cursor.newest and not reader.replaced
        except OSError:
            return False

    def _poll(self) -> list[Piece]:
        """What is new in the file, or in the file that took its place."""
        pieces: list[Piece] = []
        if self._reader is not None and self._cursor is not None:
            replaced = self._reader.replaced
            pieces += self._advance(self._reader, self._cursor)
            if not replaced:
                return pieces
            pending = list(events(self._cursor.outstanding()))
            if pending:  # the engine died in the call
                header = self._reader.header
                pieces.append(Piece(pending, header.device, header.created_wall_ns, self._cursor.newest))
            self._reader.close()
            self._reader = self._cursor = None
        if self._open() and self._reader is not None and self._cursor is not None:
            pieces += self._advance(self._reader, self._cursor, begins=True)
        return pieces

    @staticmethod
    def _advance(reader: FlightRecorderReader, cursor: TraceCursor, *, begins: bool = False) -> list[Piece]:
        piece = cursor.advance()
        found = list(piece.events())
        if not found and not begins:
            return []
        header = reader.header
        return [Piece(found, header.device, header.created_wall_ns, cursor.settled, begins)]


def _rest_of_previous(path: Path, start: Position) -> Piece:
    """What is left to read of the trace before this one; a gap if it is gone."""
    previous = path.with_name(path.name + ".previous")
    try:
        with FlightRecorderReader(previous) as reader:
            if reader.header.created_wall_ns == start.created:
                place, ahead = _place(reader, start)
                found = [*ahead, *reader.read(place + 1).events()]
                last = found[-1].index if found else place
                return Piece(found, reader.header.device, start.created, last)
    except TraceFileError:
        pass
    lost = gap(0, "the trace that was being read is gone: the engine was started again")
    return Piece([lost], "host", start.created, start.record)


def _place(reader: FlightRecorderReader, start: Position) -> tuple[int, list[TraceEvent]]:
    """The record to go on after, and a gap if the trace has not come to `start`.

    Taken at its word, such a place would hide every record up to there.
    """
    if start.record <= reader.newest:
        return start.record, []
    text = f"there is no record {start.record} in this trace; it follows from its beginning"
    return 0, [gap(0, text)]
