"""Opens a trace, whatever form it is in: a flight recorder's file, or JSON lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from app.trace.ndjson import NdjsonTrace, is_ndjson
from engine.memory.errors import TraceFileError
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import MAGIC, EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["RecorderTrace", "Trace", "open_trace", "writer_of"]

_PEEK_BYTES = 4096


class Trace(Protocol):
    """Records in the order in which they were asked for. Read once, from the start."""

    @property
    def header(self) -> TraceHeader:
        """What the trace is of."""

    @property
    def state(self) -> str:
        """How the trace ended, as far as the file tells; empty if it does not."""

    def events(self) -> Iterator[TraceEvent]:
        """The records; what is missing among them comes as GAP events."""


@dataclass(frozen=True, slots=True)
class RecorderTrace:
    """A flight recorder's file."""

    reader: FlightRecorderReader

    @property
    def header(self) -> TraceHeader:
        return self.reader.header

    @property
    def state(self) -> str:
        closed = self.reader.closed_ns
        if closed:
            return f"ended at {_moment(closed)}"
        if writer_of(self.header):
            return f"process {self.header.pid} is writing it"
        return f"process {self.header.pid} ended without closing it"

    def events(self) -> Iterator[TraceEvent]:
        for piece in self.reader.chunks():
            yield from piece.events()
            if piece.torn:
                yield damaged(piece.torn)


def damaged(count: int) -> TraceEvent:
    """Stands for records of which not even the request can be read."""
    text = f"{count} records are damaged"
    return TraceEvent(kind=EventKind.GAP, state=EventState.OK, size=count, text=text)


@contextmanager
def open_trace(path: Path) -> Iterator[Trace]:
    """The trace at `path`; ``-`` is standard input, which takes JSON lines only.

    Raises
    ------
    TraceFileError
        Missing, neither form, or damaged: one line that names the file.
    """
    if str(path) == "-":
        yield NdjsonTrace.open("standard input", sys.stdin.buffer)
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be opened: {error.strerror}") from error
    with file:
        start = _peek(file, path)
        if start.startswith(MAGIC):
            with FlightRecorderReader(path) as reader:
                yield RecorderTrace(reader)
            return
        if not start.strip():
            raise TraceFileError(f"{path}: is empty: expected a trace")
        if not is_ndjson(start):
            raise TraceFileError(
                f"{path}: is no trace: expected a flight recorder's file or JSON lines "
                "(`vtserve trace import` reads torch memory snapshots and logs)"
            )
        yield NdjsonTrace.open(str(path), file)


def writer_of(header: TraceHeader) -> bool:
    """Whether the process that wrote the trace still runs here, as far as its number tells."""
    if header.pid <= 0:
        return False
    try:
        os.kill(header.pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _peek(file: BufferedReader, path: Path) -> bytes:
    """How `file` begins. It may be a pipe, which cannot be wound back."""
    try:
        return file.peek(_PEEK_BYTES)
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be read: {error.strerror}") from error


def _moment(ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"
