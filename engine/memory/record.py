"""The flight recorder's binary format, version 1. docs/ALLOC_TRACE.md draws it.

A file is a header of 4,096 bytes and a ring of fixed-size records. A record has two halves, each with its own
checksum: what was asked, written before the driver is called, and what came of it, written after. The first
half is never touched again, so a process that dies in between, or while it writes the second half, leaves
the request.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.memory.errors import Why

__all__ = [
    "HEADER_BYTES",
    "RECORD_BYTES",
    "RECORD_DTYPE",
    "EventKind",
    "EventState",
    "TraceEvent",
    "TraceHeader",
    "events",
]


class EventKind(enum.IntEnum):
    """What a record is about."""

    ALLOC = 1
    FREE = 2
    NOTE = 3
    """something the trace wants to say: a retry, a free of an unknown pointer"""
    BYPASS = 4
    """device memory that went past the injected allocator"""
    GAP = 5
    """records are missing here; `size` is how many"""


class EventState(enum.IntEnum):
    """How far a record got."""

    INTENT = 0
    """asked, and no outcome: still running, or the process ended in the call"""
    OK = 1
    FAILED = 2
    TORN = 3
    """the process ended while it wrote the outcome, or the outcome is damaged"""


FREE_IS_READ = 1
"""Flag: `free` was read from the device for this record; otherwise it is the tracked estimate."""
HAS_TEXT = 2
"""Flag: `text` belongs to this record (it is not cleared when a slot is used again)."""

WHY_CODES: dict[Why | None, int] = {
    None: 0,
    Why.FULL: 1,
    Why.FRAGMENTATION: 2,
    Why.ADDRESS_SPACE: 3,
    Why.CAP: 4,
    Why.NEIGHBOUR: 5,
    Why.EARLIER_ERROR: 6,
    Why.INJECTED: 7,
}
_KINDS = {kind.value: kind for kind in EventKind}
_STATES = {state.value: state for state in EventState}
_WHY_OF = {code: why for why, code in WHY_CODES.items()}

_ASKED_NAMES = [("tag", "S112"), ("site", "S88"), ("requests", "S120")]
_ASKED = [
    ("index", "<u8"),  # position in the trace, from 1; the slot is (index - 1) mod capacity
    ("sequence", "<u8"),  # #N of the allocation; of a free: of the allocation it ends
    ("size", "<i8"),
    ("asked_pointer", "<u8"),  # what is to be freed
    ("stream", "<u8"),
    ("thread", "<u8"),
    ("started_ns", "<u8"),  # monotonic clock
    ("wall_ns", "<u8"),  # nanoseconds since 1970 (UTC), when it was asked
    ("api", "S8"),
    ("kind", "u1"),
    ("asked_reserved", "u1"),
    ("request_count", "<u2"),  # serving requests in the step; `requests` may hold fewer ids
    ("asked_crc", "<u4"),  # CRC-32 of the record up to here
]
_OUTCOME = [
    ("outcome_index", "<u8"),  # repeats `index`: an outcome left by an earlier lap is not this record's
    ("pointer", "<u8"),
    ("live", "<i8"),  # bytes live in the traced resource afterwards
    ("free", "<i8"),  # bytes free on the device afterwards; -1 unknown
    ("pool_used", "<i8"),  # -1 where there is no pool
    ("pool_reserved", "<i8"),
    ("finished_ns", "<u8"),  # monotonic clock
    ("error_code", "<i4"),
    ("retries", "<u2"),
    ("state", "u1"),
    ("why", "u1"),
    ("flags", "u1"),
    ("outcome_reserved", "V3"),
    ("outcome_crc", "<u4"),  # CRC-32 of the outcome up to here, then of `text` if it belongs to the record
    ("text", "S104"),  # the driver's error text, or what a note says
]

RECORD_DTYPE = np.dtype(_ASKED_NAMES + _ASKED + _OUTCOME)
"""One record. Little-endian, packed."""
RECORD_BYTES = RECORD_DTYPE.itemsize

NAMES_BYTES = 320
ASKED_AT = 320
ASKED_CRC_AT = 396
OUTCOME_AT = 400
OUTCOME_CRC_AT = 468
TEXT_AT = 472
TEXT_BYTES = 104
NAMES_STRUCT = struct.Struct("<112s88s120s")
ASKED_STRUCT = struct.Struct("<QQqQQQQQ8sBxH")
OUTCOME_STRUCT = struct.Struct("<QQqqqqQiHBBB3x")
CRC_STRUCT = struct.Struct("<I")

# -- header ------------------------------------------------------------------------------------------------

MAGIC = b"VTALLOC\x00"
VERSION = 1
HEADER_BYTES = 4096
HEADER_STRUCT = struct.Struct("<8sIIII")  # magic, version, header bytes, JSON bytes, CRC-32 of the JSON
WRITTEN_AT = 4080  # about the newest index
CLOSED_AT = 4088  # wall clock of a clean close, or 0
COUNTER_STRUCT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace is of: written once, when the recorder is created."""

    capacity: int
    """records the ring holds"""
    device: str = "host"
    api: str = "host"
    total: int = 0
    """bytes of the device"""
    pid: int = 0
    created_wall_ns: int = 0
    created_monotonic_ns: int = 0
    min_bytes: int = 0
    low_free_bytes: int = 0
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """The 4,096 bytes of the header. The fields of a record are spelled out in it for foreign readers."""
        facts = {name: getattr(self, name) for name in self.__slots__}
        facts["fields"] = [[name, kind] for name, kind in _ASKED_NAMES + _ASKED + _OUTCOME]
        text = json.dumps(facts, separators=(",", ":")).encode()
        start = HEADER_STRUCT.pack(MAGIC, VERSION, HEADER_BYTES, len(text), zlib.crc32(text))
        header = start + text
        if len(header) > WRITTEN_AT:
            raise ValueError("the trace header does not fit its page")
        return header.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes) -> TraceHeader:
        """Parse a header. Raises ValueError with a few words on what is wrong."""
        if len(data) < HEADER_BYTES:
            raise ValueError(f"{len(data)} bytes are too short for a header")
        magic, version, header_bytes, length, crc = HEADER_STRUCT.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("not a flight recorder's file")
        if version != VERSION or header_bytes != HEADER_BYTES:
            raise ValueError(f"format version {version}, expected {VERSION}")
        text = data[HEADER_STRUCT.size : HEADER_STRUCT.size + length]
        if HEADER_STRUCT.size + length > WRITTEN_AT or zlib.crc32(text) != crc:
            raise ValueError("the header is damaged")
        try:
            facts = json.loads(text)
            fields = facts.pop("fields")
            header = cls(**facts)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError("the header is damaged") from None
        expected = [[name, kind] for name, kind in _ASKED_NAMES + _ASKED + _OUTCOME]
        if fields != expected or type(header.capacity) is not int or not 0 < header.capacity < 1 << 32:
            raise ValueError("the header describes records of another kind")
        standard = cls(capacity=1)
        for name in cls.__slots__:
            value = getattr(header, name)
            if type(value) is not type(getattr(standard, name)):
                raise ValueError("the header is damaged")
            if isinstance(value, int) and not 0 <= value < 1 << 63:
                raise ValueError("the header is damaged")
        return header


# -- names -------------------------------------------------------------------------------------------------


def encode_names(tag: str, site: str, requests: tuple[str, ...]) -> bytes:
    """The fixed-width names of a record. A long tag keeps both ends, a site its end, requests whole ids."""
    return NAMES_STRUCT.pack(_both_ends(tag, 112), _end(site, 88), _whole_ids(requests, 120))


def encode_text(text: str) -> bytes:
    """An error's or note's text on one line, in the bytes a record has for it."""
    return " ".join(text.split()).encode("utf-8", "replace")[:TEXT_BYTES]


def _both_ends(text: str, room: int) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) <= room:
        return data
    head = room // 3
    return data[:head] + b"~" + data[-(room - head - 1) :]


def _end(text: str, room: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= room else b"~" + data[-(room - 1) :]


def _whole_ids(requests: tuple[str, ...], room: int) -> bytes:
    data = b""
    for request in requests:
        more = (b"," if data else b"") + request.encode("utf-8", "replace")
        if len(data) + len(more) > room:
            break
        data += more
    return data


# -- events ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TraceEvent:
    """One record in plain Python types: what lines, JSON and the tools are made from."""

    kind: EventKind
    state: EventState
    size: int
    index: int = 0
    sequence: int = 0
    tag: str = "other"
    site: str = ""
    requests: tuple[str, ...] = ()
    request_count: int = 0
    api: str = "host"
    pointer: int = 0
    live: int = 0
    free: int | None = None
    free_is_read: bool = False
    pool_used: int | None = None
    pool_reserved: int | None = None
    stream: int = 0
    thread: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    wall_ns: int = 0
    retries: int = 0
    error_code: int = 0
    why: Why | None = None
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; enumerations by their lower-case names."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        facts["kind"] = self.kind.name.lower()
        facts["state"] = self.state.name.lower()
        facts["why"] = self.why.value if self.why else None
        facts["requests"] = list(self.requests)
        return facts


def events(records: np.ndarray) -> Iterator[TraceEvent]:
    """The events of `records` (`RECORD_DTYPE`, as a reader gives them), in order."""
    # Names repeat: decoding each once, and unpacking by place, is what makes a million records bearable.
    text = _text
    names: dict[bytes, str] = {}
    ids: dict[bytes, tuple[str, ...]] = {b"": ()}
    for (
        tag,
        site,
        requests,
        index,
        sequence,
        size,
        _asked_pointer,
        stream,
        thread,
        started_ns,
        wall_ns,
        api,
        kind,
        _asked_reserved,
        request_count,
        _asked_crc,
        _outcome_index,
        pointer,
        live,
        free,
        pool_used,
        pool_reserved,
        finished_ns,
        error_code,
        retries,
        state,
        why,
        flags,
        _outcome_reserved,
        _outcome_crc,
        said,
    ) in records.tolist():
        for name in (tag, site, api):
            if name not in names:
                names[name] = text(name)
        if requests not in ids:
            ids[requests] = tuple(text(requests).split(","))
        yield TraceEvent(
            _KINDS.get(kind, EventKind.NOTE),
            _STATES[state],
            size,
            index,
            sequence,
            names[tag],
            names[site],
            ids[requests],
            request_count,
            names[api],
            pointer,
            live,
            free if free >= 0 else None,
            bool(flags & FREE_IS_READ),
            pool_used if pool_used >= 0 else None,
            pool_reserved if pool_reserved >= 0 else None,
            stream,
            thread,
            started_ns,
            finished_ns,
            wall_ns,
            retries,
            error_code,
            _WHY_OF.get(why),
            text(said) if said else "",
        )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
