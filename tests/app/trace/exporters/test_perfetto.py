"""The trace is one to Perfetto's schema and to its trace processor."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from app.trace.exporters import EXPORTERS
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from tests.app.trace.exporters.trace_processor import WebAssemblyTraceProcessor, trace_processor
from tests.app.trace.making import MIB, events_of, traces

pytest.importorskip("perfetto", reason="perfetto is not installed")

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    Trace,
    TracePacket,
    TrackEvent,
)

HEADER = TraceHeader(capacity=1, device="cuda", pid=4321, created_monotonic_ns=4_000, created_wall_ns=9_000)


def decoded(events: list[TraceEvent]) -> list[Any]:
    trace = Trace()
    trace.ParseFromString(b"".join(EXPORTERS["perfetto"].encode(events, HEADER)))
    assert not trace.FindInitializationErrors()
    return list(trace.packet)


class Replay:
    """Reads packets as the trace processor does: names by number, slices by track, counters by time."""

    def __init__(self, packets: list[Any]) -> None:
        self.tracks: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.open: dict[int, tuple[str, int, dict[str, Any]]] = {}
        self.closed: list[tuple[str, int, int]] = []
        self.counters: dict[str, list[int]] = {}
        self.instants: list[tuple[str, dict[str, Any]]] = []
        self.most_open = 0
        for place, packet in enumerate(packets):
            assert packet.trusted_packet_sequence_id == 1
            cleared = bool(packet.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
            assert cleared == (place == 0)
            for entry in packet.interned_data.event_names:
                assert self.names.setdefault(entry.iid, entry.name) == entry.name
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks
                assert not track.parent_uuid or track.parent_uuid in self.tracks
                self.tracks[track.uuid] = track
            if packet.HasField("track_event"):
                self._event(packet.timestamp, packet.track_event)

    def _event(self, time: int, event: Any) -> None:
        annotations = {note.name: getattr(note, note.WhichOneof("value")) for note in event.debug_annotations}
        uuid = event.track_uuid
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert not self.tracks[uuid].HasField("counter")
            assert uuid not in self.open
            assert all(end <= time for name, end, track in self.closed if track == uuid)
            self.open[uuid] = (self.names[event.name_iid], time, annotations)
            self.most_open = max(self.most_open, len(self.open))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, begin, _ = self.open.pop(uuid)
            assert begin <= time
            self.closed.append((name, time, uuid))
        elif event.type == TrackEvent.TYPE_INSTANT:
            self.instants.append((event.name, annotations))
        else:
            assert event.type == TrackEvent.TYPE_COUNTER
            self._counted(uuid, event.counter_value)
        pairs = zip(event.extra_counter_track_uuids, event.extra_counter_values, strict=True)
        for counter, value in pairs:
            self._counted(counter, value)

    def _counted(self, uuid: int, value: int) -> None:
        assert self.tracks[uuid].HasField("counter")
        self.counters.setdefault(self.tracks[uuid].name, []).append(value)


@given(traces())
def test_blocks_are_slices_and_live_is_a_counter(events: list[TraceEvent]) -> None:
    replay = Replay(decoded(events))
    done = [event for event in events if event.state is EventState.OK and event.kind <= EventKind.FREE]
    assert replay.counters.get("live", []) == [event.live for event in done]
    assert replay.counters.get("free", []) == [event.free for event in done]
    frees = [event for event in done if event.kind is EventKind.FREE]
    assert sorted(name for name, _, _ in replay.closed) == sorted(event.tag for event in frees)
    ended = {event.sequence for event in frees}
    held = [event for event in done if event.kind is EventKind.ALLOC and event.sequence not in ended]
    assert sorted((name, note["size"], note["number"]) for name, _, note in replay.open.values()) == sorted(
        (event.tag, event.size, event.sequence) for event in held
    )
    failures = [event for event in events if event.state is EventState.FAILED]
    assert [note["size"] for name, note in replay.instants if name.startswith("failed ")] == [
        event.size for event in failures
    ]
    # Tracks are used again: beside the counters there are as many as blocks were live at once, and one each
    # for a first segment, the process and the failures.
    assert len(replay.tracks) <= replay.most_open * 4 + 4 + 2 + 4


def test_pool_figures_and_clocks(loaded: SimpleNamespace) -> None:
    events = events_of(loaded.path)
    events[0].pool_used, events[0].pool_reserved = 100 * MIB, 128 * MIB
    packets = decoded(events)
    replay = Replay(packets)
    assert (replay.counters["pool used"], replay.counters["pool reserved"]) == ([100 * MIB], [128 * MIB])
    clocks = {clock.clock_id: clock.timestamp for clock in packets[0].clock_snapshot.clocks}
    assert clocks == {6: 4_000, 1: 9_000}
    process = next(track for track in replay.tracks.values() if track.HasField("process"))
    assert (process.process.pid, process.process.process_name) == (4321, "vtserve memory, cuda")
    assert replay.instants == [
        (
            "failed workspace",
            {"size": 64 * MIB, "number": 6, "site": events[-1].site, "text": "out of memory", "why": "full"},
        )
    ]


def test_damaged_order_does_not_end_what_did_not_begin() -> None:
    """A free of an older block, and an address that is allocated twice."""
    free = TraceEvent(EventKind.FREE, EventState.OK, 5, pointer=9, live=7, started_ns=10, finished_ns=11)
    first = TraceEvent(EventKind.ALLOC, EventState.OK, 1, pointer=4, sequence=1, finished_ns=12, tag="kv")
    second = TraceEvent(EventKind.ALLOC, EventState.OK, 2, pointer=4, sequence=2, finished_ns=11, tag="io")
    replay = Replay(decoded([free, first, second]))
    assert replay.counters["live"][0] == 7
    assert [name for name, _, _ in replay.closed] == ["kv"]
    assert [name for name, _, _ in replay.open.values()] == ["io"]


@pytest.fixture(scope="module")
def processor() -> Iterator[WebAssemblyTraceProcessor]:
    with trace_processor() as opened:
        yield opened


def load(processor: WebAssemblyTraceProcessor, events: list[TraceEvent]) -> None:
    processor.load(b"".join(EXPORTERS["perfetto"].encode(events, HEADER)))
    errors = processor.query(
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    )
    assert errors == []


def counted(processor: WebAssemblyTraceProcessor, name: str) -> list[int]:
    rows = processor.query(
        "select c.value as value from counter c join counter_track t on c.track_id = t.id "
        f"where t.name = '{name}' order by c.id"
    )
    return [int(row["value"]) for row in rows]


def test_the_processor_refuses_what_is_no_trace(processor: WebAssemblyTraceProcessor) -> None:
    with pytest.raises(AssertionError, match="Unknown trace type"):
        processor.load(b"no trace at all" * 100)
    load(processor, [])
    assert processor.query("select count(*) as n from slice") == [{"n": 0}]
    with pytest.raises(AssertionError, match="no such column"):
        processor.query("select nonsense from slice")


def test_trace_processor_opens_it(processor: WebAssemblyTraceProcessor, loaded: SimpleNamespace) -> None:
    load(processor, events_of(loaded.path))
    slices = processor.query("select name, dur from slice where dur != 0 order by ts")
    assert [row["name"] for row in slices] == [
        "kv",
        "weights/model.layers.0.mlp",
        "repack/model.layers.0.mlp",
        "weights/model.layers.1.mlp",
        "repack/model.layers.1.mlp",
    ]
    assert max(counted(processor, "live")) == loaded.peak
    failures = processor.query(
        "select s.name, a.int_value as size from slice s join args a using (arg_set_id) "
        "where s.name like 'failed%' and a.key = 'debug.size'"
    )
    assert failures == [{"name": "failed workspace", "size": 64 * MIB}]
    assert processor.query("select pid, name from process where pid = 4321") == [
        {"pid": 4321, "name": "vtserve memory, cuda"}
    ]


@settings(max_examples=40)
@given(traces())
def test_trace_processor_reads_any_trace(
    processor: WebAssemblyTraceProcessor, events: list[TraceEvent]
) -> None:
    load(processor, events)
    done = [event for event in events if event.state is EventState.OK and event.kind <= EventKind.FREE]
    assert counted(processor, "live") == [event.live for event in done]
    freed = {event.sequence: event.finished_ns for event in done if event.kind is EventKind.FREE}
    blocks = [event for event in done if event.kind is EventKind.ALLOC]
    rows = processor.query(
        "select s.name, s.ts, s.dur, number.int_value as number, size.int_value as size from slice s "
        "join args number on number.arg_set_id = s.arg_set_id and number.key = 'debug.number' "
        "join args size on size.arg_set_id = s.arg_set_id and size.key = 'debug.size' "
        "where s.dur != 0 order by number"
    )
    assert rows == [
        {
            "name": block.tag,
            "ts": block.finished_ns,
            "dur": freed[block.sequence] - block.finished_ns if block.sequence in freed else -1,
            "number": block.sequence,
            "size": block.size,
        }
        for block in blocks
    ]
