"""Traces as JSON lines: a header's line first, then a line for each record.

The header's line may be missing: what ``/debug/alloc`` gives to ``Accept: application/x-ndjson`` has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO

import msgspec

from app.trace_filter import event_json
from engine.memory.errors import TraceFileError, Why
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["NdjsonTrace", "encode", "is_ndjson"]

_MOST_LINE_BYTES = 1 << 20
_MOST_SIZE = 1 << 48
"""bytes of a block, far beyond any device: sums of many stay within 64 bits"""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
Word = Annotated[int, msgspec.Meta(ge=0)]  # msgspec compares with bounds of 63 bits only; see _event
_WORD_LIMIT = 1 << 64

_KINDS = {kind.name.lower(): kind for kind in EventKind}
_STATES = {state.name.lower(): state for state in EventState}
_WHYS: dict[str | None, Why | None] = {None: None, **{why.value: why for why in Why}}


class _Line(msgspec.Struct):
    """A record's line: what `event_json` writes. Whatever else a line has is of no interest."""

    kind: str
    size: Count = 0
    of: str | None = None
    state: str | None = None
    index: Count = 0
    sequence: Count = 0
    tag: str = "other"
    site: str = ""
    requests: tuple[str, ...] = ()
    request_count: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    api: str = "host"
    pointer: Word = 0
    live: Signed = 0
    free: Signed | None = None
    free_is_read: bool = False
    pool_used: Signed | None = None
    pool_reserved: Signed | None = None
    stream: Word = 0
    thread: Word = 0
    started_ns: Count = 0
    finished_ns: Count = 0
    wall_ns: Count = 0
    retries: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    error_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    why: str | None = None
    text: str = ""


class _HeaderLine(msgspec.Struct, tag="header", tag_field="kind"):
    """The first line."""

    device: str = "host"
    api: str = "host"
    total: Count = 0
    pid: Count = 0
    capacity: Count = 0
    created_wall_ns: Count = 0
    created_monotonic_ns: Count = 0
    min_bytes: Count = 0
    low_free_bytes: Count = 0


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_header = msgspec.json.Decoder(_HeaderLine).decode


@dataclass(frozen=True, slots=True)
class NdjsonTrace:
    """A trace read from JSON lines, once, from the start."""

    header: TraceHeader
    _name: str
    _lines: BinaryIO
    _first: bytes
    """a line that was read to look for the header, and is a record's"""

    @classmethod
    def open(cls, name: str, lines: BinaryIO) -> NdjsonTrace:
        """The trace in `lines`; `name` is what errors call it.

        Raises
        ------
        TraceFileError
            The first line is neither a header nor a record.
        """
        first = _read_line(lines, name, 1)
        while first and not first.strip():
            first = _read_line(lines, name, 1)
        if not first:
            return cls(TraceHeader(capacity=1), name, lines, b"")
        try:
            return cls(_header(_decode_header(first)), name, lines, b"")
        except msgspec.MsgspecError as error:
            line = _parse(first, name, 1)
            if line.kind == "header":
                raise TraceFileError(f"{name}: line 1: {error}") from None
        # The line format of a device is the only thing that a header is needed for.
        api = line.api
        return cls(TraceHeader(capacity=1, device=_device_of(api), api=api), name, lines, first)

    def events(self) -> Iterator[TraceEvent]:
        """The records, in their order in the file.

        Raises
        ------
        TraceFileError
            A line is no record: names the line, the field, and what was expected.
        """
        number = 1
        data = self._first or _read_line(self._lines, self._name, number := 2)
        while data:
            if data.strip():
                yield _event(_parse(data, self._name, number), self._name, number)
            number += 1
            data = _read_line(self._lines, self._name, number)

    @property
    def state(self) -> str:
        """How the trace ended, as far as the file tells."""
        return ""


def is_ndjson(start: bytes) -> bool:
    """Whether a file that begins with `start` may be JSON lines."""
    return start.lstrip()[:1] == b"{"


def encode(events: Iterable[TraceEvent], header: TraceHeader) -> Iterator[bytes]:
    """The trace as JSON lines, in pieces."""
    facts = {name: getattr(header, name) for name in _HeaderLine.__struct_fields__}
    yield msgspec.json.encode(_HeaderLine(**facts)) + b"\n"
    for event in events:
        yield event_json(event) + b"\n"


def _header(line: _HeaderLine) -> TraceHeader:
    facts: dict[str, Any] = msgspec.structs.asdict(line)
    facts["capacity"] = max(line.capacity, 1)
    return TraceHeader(**facts)


def _device_of(api: str) -> str:
    return "host" if api in ("host", "plan") else "cuda"


def _read_line(lines: BinaryIO, name: str, number: int) -> bytes:
    try:
        data = lines.readline(_MOST_LINE_BYTES)
    except OSError as error:
        raise TraceFileError(f"{name}: cannot be read: {error.strerror}") from error
    if len(data) == _MOST_LINE_BYTES:
        raise TraceFileError(f"{name}: line {number}: longer than {_MOST_LINE_BYTES} bytes, so no record")
    return data


def _parse(data: bytes, name: str, number: int) -> _Line:
    try:
        return _decode_line(data)
    except msgspec.ValidationError as error:
        raise TraceFileError(f"{name}: line {number}: not a record: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise TraceFileError(f"{name}: line {number}: not a JSON object") from None


def _event(line: _Line, name: str, number: int) -> TraceEvent:
    """The event; `kind` may be one of `app.trace_filter.KINDS`, which fold the state in."""

    def problem(field: str, value: object, expected: str) -> TraceFileError:
        return TraceFileError(f"{name}: line {number}: {field}={str(value)[:40]!r}: expected {expected}")

    kind = _KINDS.get(line.of or line.kind)
    state = _STATES.get(line.state) if line.state is not None else EventState.OK
    if line.kind == "failed" or line.kind == "pending":
        kind = kind or EventKind.ALLOC
        if line.state is None:
            state = EventState.FAILED if line.kind == "failed" else EventState.INTENT
    if kind is None:
        raise problem("kind", line.of or line.kind, f"one of {', '.join(_KINDS)}")
    if state is None:
        raise problem("state", line.state, f"one of {', '.join(_STATES)}")
    if line.why not in _WHYS:
        raise problem("why", line.why, f"one of {', '.join(why.value for why in Why)}")
    if line.size > _MOST_SIZE and state is EventState.OK:
        raise problem("size", line.size, f"{_MOST_SIZE} bytes at most")
    for field in ("pointer", "stream", "thread"):
        if getattr(line, field) >= _WORD_LIMIT:
            raise problem(field, getattr(line, field), "at most 64 bits")
    return TraceEvent(
        kind=kind,
        state=state,
        size=line.size,
        index=line.index,
        sequence=line.sequence,
        tag=line.tag,
        site=line.site,
        requests=line.requests,
        request_count=max(line.request_count, len(line.requests)),
        api=line.api,
        pointer=line.pointer,
        live=line.live,
        free=line.free,
        free_is_read=line.free_is_read,
        pool_used=line.pool_used,
        pool_reserved=line.pool_reserved,
        stream=line.stream,
        thread=line.thread,
        started_ns=line.started_ns,
        finished_ns=line.finished_ns,
        wall_ns=line.wall_ns,
        retries=line.retries,
        error_code=line.error_code,
        why=_WHYS[line.why],
        text=line.text,
    )
