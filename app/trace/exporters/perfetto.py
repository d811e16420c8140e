"""Perfetto's protobuf trace, for ui.perfetto.dev and its trace processor.

Counters are what was live and free on the device, and the pool's figures where there is a pool. Each block
is a slice from its allocation to its free, on a track of the first segment of its tag; a track holds one
block at a time and is used again, so there are as many as blocks were live at once. What failed, has no
outcome, went past the allocator or is missing is an instant event on a track of its own.

Timestamps are the trace's monotonic clock, given as Perfetto's boot time, with a snapshot of the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    CounterDescriptor,
    Trace,
    TracePacket,
    TrackEvent,
)

from app.trace_filter import event_kind
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["encode"]

_BATCH = 512
_MOST_NAMES = 65_536
_SEQUENCE = 1
_PROCESS, _REMARKABLE = 1, 2
_COUNTERS = {"live": 3, "free": 4, "pool used": 5, "pool reserved": 6}
_FIRST_TRACK = 16
_MOST_INT64 = (1 << 63) - 1


@dataclass(slots=True)
class _Track:
    """Where one block at a time is shown."""

    uuid: int
    last_ns: int = 0
    """when its last block was allocated or freed; threads may be out of order by a little"""


@dataclass(slots=True)
class _Tracks:
    """The tracks of one first segment of tags."""

    parent: int
    idle: list[_Track] = field(default_factory=list)


def encode(events: Iterable[TraceEvent], header: TraceHeader) -> Iterator[bytes]:
    """The trace, in pieces that are traces themselves: Perfetto reads them one behind the other."""
    writer = _Writer(header)
    for event in events:
        writer.add(event)
        if len(writer.trace.packet) >= _BATCH:
            yield writer.take()
    yield writer.take()


class _Writer:
    def __init__(self, header: TraceHeader) -> None:
        self.trace = Trace()
        self._next_track = _FIRST_TRACK
        self._segments: dict[str, _Tracks] = {}
        self._live: dict[int, tuple[_Track, _Tracks]] = {}
        """by address"""
        self._names: dict[str, int] = {}
        self._now = 0
        start = self.trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, first_packet_on_sequence=True)
        start.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        start.timestamp = header.created_monotonic_ns
        clocks = start.clock_snapshot.clocks
        clocks.add(clock_id=BUILTIN_CLOCK_BOOTTIME, timestamp=header.created_monotonic_ns)
        clocks.add(clock_id=BUILTIN_CLOCK_REALTIME, timestamp=header.created_wall_ns)
        process = self._describe(_PROCESS, f"vtserve memory, {header.device}", parent=0)
        process.track_descriptor.process.pid = header.pid if 0 < header.pid < 1 << 31 else 1
        process.track_descriptor.process.process_name = f"vtserve memory, {header.device}"
        self._describe(_REMARKABLE, "failures and notes")
        for name, uuid in _COUNTERS.items():
            counter = self._describe(uuid, name).track_descriptor.counter
            counter.unit = CounterDescriptor.UNIT_SIZE_BYTES

    def take(self) -> bytes:
        """What was added since the last call."""
        data: bytes = self.trace.SerializeToString()
        self.trace = Trace()
        return data

    def add(self, event: TraceEvent) -> None:
        """Add one event."""
        self._now = min(event.finished_ns or event.started_ns or self._now + 1, _MOST_INT64)
        if event.state is EventState.OK:
            if event.kind is EventKind.ALLOC:
                self._begin(event)
                return
            if event.kind is EventKind.FREE:
                self._end(event)
                return
        self._remark(event)

    def _begin(self, event: TraceEvent) -> None:
        segment = event.tag.partition("/")[0]
        tracks = self._segments.get(segment)
        if tracks is None:
            tracks = self._segments[segment] = _Tracks(self._new_track(segment, _PROCESS))
        track = tracks.idle.pop() if tracks.idle else _Track(self._new_track(segment, tracks.parent))
        before = self._live.get(event.pointer)
        if before is not None:  # its free is missing
            self._end_slice(*before)
        self._live[event.pointer] = (track, tracks)
        track.last_ns = max(self._now, track.last_ns)
        packet = self._packet(track.last_ns)
        slice_begin = packet.track_event
        slice_begin.type = TrackEvent.TYPE_SLICE_BEGIN
        slice_begin.track_uuid = track.uuid
        self._name(packet, event.tag)
        annotations = slice_begin.debug_annotations
        annotations.add(name="size", int_value=min(event.size, _MOST_INT64))
        annotations.add(name="number", uint_value=event.sequence)
        annotations.add(name="site", string_value=event.site)
        if event.requests:
            annotations.add(name="requests", string_value=",".join(event.requests))
        self._count(slice_begin, event)

    def _end(self, event: TraceEvent) -> None:
        found = self._live.pop(event.pointer, None)
        if found is None:  # it is older than the trace
            packet = self._packet(self._now)
            packet.track_event.type = TrackEvent.TYPE_COUNTER
            packet.track_event.track_uuid = _COUNTERS["live"]
            packet.track_event.counter_value = event.live
            return
        self._count(self._end_slice(*found).track_event, event)

    def _end_slice(self, track: _Track, tracks: _Tracks) -> TracePacket:
        track.last_ns = max(self._now, track.last_ns)
        tracks.idle.append(track)
        packet = self._packet(track.last_ns)
        packet.track_event.type = TrackEvent.TYPE_SLICE_END
        packet.track_event.track_uuid = track.uuid
        return packet

    def _remark(self, event: TraceEvent) -> None:
        packet = self._packet(self._now)
        packet.track_event.type = TrackEvent.TYPE_INSTANT
        packet.track_event.track_uuid = _REMARKABLE
        kind = event_kind(event)
        about_tag = event.kind in (EventKind.ALLOC, EventKind.FREE)
        packet.track_event.name = f"{kind} {event.tag}" if about_tag else f"{kind} {event.text}"
        annotations = packet.track_event.debug_annotations
        annotations.add(name="size", int_value=min(event.size, _MOST_INT64))
        annotations.add(name="number", uint_value=event.sequence)
        annotations.add(name="site", string_value=event.site)
        annotations.add(name="text", string_value=event.text)
        if event.why is not None:
            annotations.add(name="why", string_value=event.why.value)

    @staticmethod
    def _count(event: TrackEvent, of: TraceEvent) -> None:
        """The counters after `of`, in the packet that shows it."""
        uuids, values = event.extra_counter_track_uuids, event.extra_counter_values
        uuids.append(_COUNTERS["live"])
        values.append(of.live)
        if of.free is not None:
            uuids.append(_COUNTERS["free"])
            values.append(of.free)
        if of.pool_used is not None and of.pool_reserved is not None:
            uuids.extend((_COUNTERS["pool used"], _COUNTERS["pool reserved"]))
            values.extend((of.pool_used, of.pool_reserved))

    def _name(self, packet: TracePacket, name: str) -> None:
        """Name the packet's event: in full once, by its number from then on."""
        number = self._names.get(name)
        if number is None:
            if len(self._names) >= _MOST_NAMES:
                packet.track_event.name = name
                return
            number = self._names[name] = len(self._names) + 1
            packet.interned_data.event_names.add(iid=number, name=name)
        packet.track_event.name_iid = number

    def _packet(self, timestamp: int) -> TracePacket:
        packet: TracePacket = self.trace.packet.add()
        packet.timestamp = timestamp
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def _new_track(self, name: str, parent: int) -> int:
        uuid = self._next_track
        self._next_track += 1
        self._describe(uuid, name, parent)
        return uuid

    def _describe(self, uuid: int, name: str, parent: int = _PROCESS) -> TracePacket:
        packet: TracePacket = self.trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_descriptor.uuid = uuid
        packet.track_descriptor.name = name
        if parent:
            packet.track_descriptor.parent_uuid = parent
        return packet
