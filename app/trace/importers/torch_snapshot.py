"""torch's memory snapshots: ``torch.cuda.memory._dump_snapshot(FILE)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from app.trace.importers.plain_pickle import load_plain
from engine.errors import ConfigurationError
from engine.memory.errors import TraceFileError, Why
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from engine.memory.scope import FIRST_SEGMENTS

__all__ = ["read_snapshot"]

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Number = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]


class _Entry(msgspec.Struct):
    action: str
    size: Count = 0
    addr: Count = 0
    stream: Count = 0
    time_us: Annotated[int, msgspec.Meta(ge=0, le=1 << 52)] = 0
    device_free: Count = 0
    frames: Any = ()


class _Block(msgspec.Struct):
    size: Size
    state: str
    requested_size: Size = 0
    frames: Any = ()


class _Segment(msgspec.Struct):
    address: Count
    total_size: Size
    blocks: list[Any]
    device: Number = 0
    stream: Count = 0
    frames: Any = ()


class _Frame(msgspec.Struct):
    filename: str
    line: Number = 0
    name: str = ""


_LIVE_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")


def read_snapshot(
    name: str, data: bytes, *, device: int | None = None, segments: bool = False
) -> tuple[TraceHeader, Iterator[TraceEvent]]:
    """Header and events of a snapshot; see `app.trace.importers.import_trace`.

    Blocks that are older than the recorded history come first: those that it frees, and those that are live
    at its end. So the sum of what is live is right from the first event on.
    """
    snapshot = load_plain(data, name)
    if isinstance(snapshot, list):  # segments only, as torch wrote it once
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, dict) or not ("segments" in snapshot or "device_traces" in snapshot):
        raise TraceFileError(
            f"{name}: no memory snapshot: expected a dictionary with segments and device_traces"
        )
    reader = _Reader(name, len(data))
    traces = reader.rows(snapshot.get("device_traces", []), "device_traces")
    found = [
        reader.convert(segment, _Segment, f"segments[{place}]")
        for place, segment in enumerate(reader.rows(snapshot.get("segments", []), "segments"))
    ]
    entries = {place: trace for place, trace in enumerate(traces) if trace}
    used = sorted(entries.keys() | {segment.device for segment in found})
    known = ", ".join(map(str, used[:8])) + (", …" if len(used) > 8 else "")
    if device is None:
        if len(used) > 1:
            raise ConfigurationError(f"--device: {name} has several: expected one of {known}")
        device = used[0] if used else 0
    elif used and device not in used:
        raise ConfigurationError(f"--device {device}: expected one of {known}")
    where = f"device_traces[{device}]"
    trace = [
        reader.convert(entry, _Entry, f"{where}[{place}]")
        for place, entry in enumerate(reader.rows(entries.get(device, []), where))
    ]
    mine = [segment for segment in found if segment.device == device]
    header = TraceHeader(capacity=max(len(trace), 1), device="cuda", api="malloc" if segments else "torch")
    actions = _SEGMENT_ACTIONS if segments else _BLOCK_ACTIONS
    return header, _Replay(reader, header.api, actions).events(trace, mine)


_BLOCK_ACTIONS = {"alloc": EventKind.ALLOC, "free_completed": EventKind.FREE}
_SEGMENT_ACTIONS = {
    "segment_alloc": EventKind.ALLOC,
    "segment_map": EventKind.ALLOC,
    "segment_free": EventKind.FREE,
    "segment_unmap": EventKind.FREE,
}
_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

T = TypeVar("T")


class _Reader:
    """Takes apart what was unpickled, whoever made it.

    A pickle may refer to one list any number of times. So lists of a file are longer than the file only where
    somebody means harm, and frames, which torch does share, are looked at once each.
    """

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self._left = length
        self._places: dict[int, tuple[str, str]] = {}

    def rows(self, value: object, where: str) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise TraceFileError(f"{self.name}: {where}: expected a list, got {type(value).__name__}")
        self._left -= len(value)
        if self._left < 0:
            raise TraceFileError(f"{self.name}: {where}: more entries than the file has bytes")
        return value

    def convert(self, value: object, kind: type[T], where: str) -> T:
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, TypeError) as error:
            raise TraceFileError(f"{self.name}: {where}: {error}") from None

    def place(self, frames: object) -> tuple[str, str]:
        """Tag and site of a stack: the innermost Python line that is not torch's own."""
        known = self._places.get(id(frames))
        if known is None:
            known = self._places[id(frames)] = self._find_place(frames)
        return known

    def _find_place(self, frames: object) -> tuple[str, str]:
        best: _Frame | None = None
        for frame in frames if isinstance(frames, list | tuple) else ():
            found = self.convert(frame, _Frame, "frames")
            if not found.filename.endswith(".py"):
                best = best or found
                continue
            best = found if best is None or not best.filename.endswith(".py") else best
            if "/torch/" not in found.filename:
                best = found
                break
        if best is None:
            return "other", ""
        tag = "".join(best.name.split())
        if (
            tag.partition("/")[0] not in FIRST_SEGMENTS
        ):  # a function's name; a trace of ours has its tags there
            tag = f"other/{tag}" if tag else "other"
        return tag, f"{best.filename}:{best.line}"


@dataclass(slots=True)
class _Live:
    sequence: int
    size: int
    tag: str
    site: str


@dataclass(slots=True)
class _Replay:
    """Turns a device's history into events."""

    reader: _Reader
    api: str
    actions: Mapping[str, EventKind]
    live: dict[int, _Live] = field(default_factory=dict)
    total: int = 0
    reserved: int = 0
    sequence: int = 0
    index: int = 0

    def events(self, entries: Sequence[_Entry], segments: Sequence[_Segment]) -> Iterator[TraceEvent]:
        """The events of `entries`, after those of the blocks that are older."""
        grown = sum(_GROWTH.get(entry.action, 0) * entry.size for entry in entries)
        self.reserved = max(sum(segment.total_size for segment in segments) - grown, 0)
        first = next((entry.time_us for entry in entries if entry.time_us), 0)
        for entry in self._older(entries, segments):
            entry.time_us = first
            yield self._allocate(entry)
        for entry in entries:
            self.reserved += _GROWTH.get(entry.action, 0) * entry.size
            kind = self.actions.get(entry.action)
            if kind is EventKind.ALLOC:
                yield self._allocate(entry)
            elif kind is EventKind.FREE:
                yield self._free(entry)
            elif entry.action == "oom":
                yield self._failure(entry)

    def _older(self, entries: Sequence[_Entry], segments: Sequence[_Segment]) -> list[_Entry]:
        """Blocks that are freed without having been allocated, or live at the end likewise."""
        older: dict[int, _Entry] = {}
        begun: set[int] = set()
        for entry in entries:
            kind = self.actions.get(entry.action)
            if kind is EventKind.ALLOC:
                begun.add(entry.addr)
            elif kind is EventKind.FREE and entry.addr not in begun:
                older.setdefault(entry.addr, msgspec.structs.replace(entry, action="older"))
            elif kind is EventKind.FREE:
                begun.discard(entry.addr)
        for segment in segments:
            for address, size, frames in self._held(segment):
                if address not in begun:
                    entry = _Entry("older", size=size, addr=address, stream=segment.stream, frames=frames)
                    older.setdefault(address, entry)
        return sorted(older.values(), key=lambda entry: entry.addr)

    def _held(self, segment: _Segment) -> Iterator[tuple[int, int, Any]]:
        """Address, bytes and frames of what is live in `segment` at the end, or the segment itself."""
        if self.actions is _SEGMENT_ACTIONS:
            yield segment.address, segment.total_size, segment.frames
            return
        address = segment.address
        for place, row in enumerate(self.reader.rows(segment.blocks, "blocks")):
            block = self.reader.convert(row, _Block, f"blocks[{place}]")
            if block.state in _LIVE_STATES:
                yield address, block.requested_size or block.size, block.frames
            address += block.size

    def _allocate(self, entry: _Entry) -> TraceEvent:
        self.sequence += 1
        tag, site = self.reader.place(entry.frames)
        self.live[entry.addr] = _Live(self.sequence, entry.size, tag, site)
        self.total += entry.size
        return self._event(entry, EventKind.ALLOC, self.live[entry.addr])

    def _free(self, entry: _Entry) -> TraceEvent:
        block = self.live.pop(entry.addr, None)
        if block is None:  # allocated twice, or freed twice: what is known is what was freed
            block = _Live(0, entry.size, *self.reader.place(entry.frames))
        self.total -= block.size
        return self._event(entry, EventKind.FREE, block)

    def _failure(self, entry: _Entry) -> TraceEvent:
        self.sequence += 1
        tag, site = self.reader.place(entry.frames)
        event = self._event(entry, EventKind.ALLOC, _Live(self.sequence, entry.size, tag, site))
        event.state = EventState.FAILED
        event.free, event.free_is_read = entry.device_free, True
        event.why = Why.FULL if entry.device_free < entry.size else Why.FRAGMENTATION
        event.text = "out of memory"
        return event

    def _event(self, entry: _Entry, kind: EventKind, block: _Live) -> TraceEvent:
        self.index += 1
        pools = self.actions is _BLOCK_ACTIONS and self.reserved > 0
        return TraceEvent(
            kind=kind,
            state=EventState.OK,
            size=block.size,
            index=self.index,
            sequence=block.sequence,
            tag=block.tag,
            site=block.site,
            api=self.api,
            pointer=entry.addr,
            live=self.total,
            pool_used=self.total if pools else None,
            pool_reserved=self.reserved if pools else None,
            stream=entry.stream,
            started_ns=entry.time_us * 1000,
            finished_ns=entry.time_us * 1000,
            wall_ns=entry.time_us * 1000,
        )
