"""The flight recorder and its reader: whole records, halves, wraps, kills, damage, and files of others."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.memory.cursor import TraceCursor
from engine.memory.errors import TraceFileError, Why
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import (
    HEADER_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    EventKind,
    EventState,
    TraceEvent,
    TraceHeader,
    events,
)
from engine.memory.recorder import FlightRecorder

TREE = Path(__file__).parents[2]


def write(
    recorder: FlightRecorder,
    size: int,
    *,
    tag: str = "weights/a",
    sequence: int = 0,
    state: int = EventState.OK,
) -> int:
    index = recorder.begin(EventKind.ALLOC, sequence or size, size, 0, 0, b"host", tag, "engine/x.py:1", ())
    recorder.end(index, state, 4096 + size, size, 77, True)
    return index


def begin(recorder: FlightRecorder, size: int) -> int:
    return recorder.begin(EventKind.ALLOC, size, size, 0, 0, b"host", "kv", "engine/x.py:2", ("r1",))


def sizes(records: np.ndarray) -> list[int]:
    return list(records["size"].tolist())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def recorder(path: Path) -> Any:
    made = FlightRecorder.create(path, TraceHeader(capacity=16, device="cuda", api="async", total=24 << 30))
    yield made
    made.close()


# -- what is written is read ---------------------------------------------------------------------------------


names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)
number = st.integers(0, (1 << 63) - 1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    asked=st.tuples(
        st.sampled_from([EventKind.ALLOC, EventKind.FREE, EventKind.NOTE, EventKind.BYPASS]),
        number, number, number, number, st.sampled_from([b"host", b"malloc", b"async"]),
        names, names, st.lists(names.filter(lambda name: name and "," not in name), max_size=2).map(tuple),
    ),
    outcome=st.tuples(
        st.sampled_from([EventState.OK, EventState.FAILED]), number, number, st.integers(-1, 1 << 60),
        st.booleans(), st.integers(-1, 1 << 60), st.integers(-1, 1 << 60), st.integers(0, 65_535),
        st.integers(-(1 << 31), (1 << 31) - 1), st.sampled_from([None, *Why]), names,
    ),
)  # fmt: skip
def test_every_field_comes_back(asked: Any, outcome: Any) -> None:
    recorder = FlightRecorder.in_memory(TraceHeader(capacity=4))
    before, started = time.time_ns(), time.monotonic_ns()
    assert recorder.end(recorder.begin(*asked), *outcome)
    (event,) = recorder.reader().read().events()
    kind, sequence, size, pointer, stream, api, tag, site, requests = asked
    state, pointer, live, free, is_read, used, reserved, retries, code, why, text = outcome
    assert event == TraceEvent(
        kind=kind, state=state, size=size, index=1, sequence=sequence, tag=tag, site=site, requests=requests,
        request_count=len(requests), api=api.decode(), pointer=pointer, live=live,
        free=free if free >= 0 else None, free_is_read=is_read, pool_used=used if used >= 0 else None,
        pool_reserved=reserved if reserved >= 0 else None, stream=stream, thread=threading.get_ident(),
        started_ns=event.started_ns, finished_ns=event.finished_ns, wall_ns=event.wall_ns, retries=retries,
        error_code=code, why=why, text=text,
    )  # fmt: skip
    assert started <= event.started_ns <= event.finished_ns <= time.monotonic_ns()
    assert before <= event.wall_ns <= time.time_ns()
    facts = json.loads(json.dumps(event.to_dict()))
    assert facts == asdict(event) | {
        "kind": kind.name.lower(),
        "state": state.name.lower(),
        "why": why.value if why else None,
        "requests": list(requests),
    }


def test_the_header_says_what_the_trace_is_of(recorder: FlightRecorder, path: Path) -> None:
    with FlightRecorderReader(path) as reader:
        header = reader.header
        assert (header.capacity, header.device, header.api, header.total) == (16, "cuda", "async", 24 << 30)
        assert header.pid == os.getpid()
        assert abs(header.created_wall_ns - time.time_ns()) < 60e9
        assert reader.closed_ns == 0
        recorder.close()
        assert reader.closed_ns > header.created_wall_ns
    assert path.stat().st_size == HEADER_BYTES + 16 * RECORD_BYTES


def test_names_that_are_too_long_keep_what_identifies_them() -> None:
    recorder = FlightRecorder.in_memory(TraceHeader(capacity=4))
    tag = "weights/" + "very.long." * 20 + "down_proj"
    site = "deep/" * 30 + "file.py:123"
    ids = tuple(f"cmpl-{number:032x}" for number in range(5))
    index = recorder.begin(EventKind.ALLOC, 1, 1, 0, 0, b"host", tag, site, ids)
    recorder.end(index, EventState.FAILED, 0, 0, 0, True, text="é" * 200)
    (event,) = recorder.reader().read().events()
    assert event.tag.startswith("weights/very")
    assert event.tag.endswith("long.down_proj")
    assert event.site.endswith("deep/file.py:123")
    assert event.requests == ids[:3]
    assert event.request_count == 5
    assert event.text.startswith("é" * 52)


def test_a_record_is_packed_as_documented() -> None:
    assert RECORD_DTYPE.itemsize == 576
    manual = (TREE / "docs" / "ALLOC_TRACE.md").read_text()
    fields = RECORD_DTYPE.fields
    assert fields is not None
    assert len(fields) > 25
    for name, (kind, offset, *_) in fields.items():
        assert f"| {offset} | `{name}` | `{kind.str}` |" in manual


def test_foreign_readers_need_only_the_file(recorder: FlightRecorder, path: Path) -> None:
    """NumPy, and the field list in the header."""
    write(recorder, 123, tag="kv")
    data = path.read_bytes()
    length = int.from_bytes(data[16:20], "little")
    fields = json.loads(data[24 : 24 + length])["fields"]
    (record, *_) = np.frombuffer(data[HEADER_BYTES:], np.dtype([tuple(field) for field in fields]))
    assert (record["tag"], record["size"], record["live"]) == (b"kv", 123, 123)


# -- the ring ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40, 1000])
def test_a_ring_that_wrapped_says_what_is_gone(count: int, recorder: FlightRecorder, path: Path) -> None:
    for size in range(1, count + 1):
        write(recorder, size)
    with FlightRecorderReader(path) as reader:
        piece = reader.read()
        assert sizes(piece.records) == list(range(max(1, count - 15), count + 1))
        assert piece.records["index"].tolist() == sizes(piece.records)
        assert (piece.first, piece.dropped, piece.torn) == (max(1, count - 15), max(0, count - 16), 0)
        if count > 16:
            gap, first, *_ = piece.events()
            assert (gap.kind, gap.size) == (EventKind.GAP, count - 16)
            assert first.index == count - 15


@pytest.mark.parametrize(("start", "dropped", "first"), [(0, 24, 25), (20, 5, 25), (25, 0, 25), (39, 0, 39)])
def test_reading_from_somewhere(
    start: int, dropped: int, first: int, recorder: FlightRecorder, path: Path
) -> None:
    for size in range(1, 41):
        write(recorder, size)
    with FlightRecorderReader(path) as reader:
        piece = reader.read(start)
        assert (piece.dropped, sizes(piece.records)) == (dropped, list(range(first, 41)))
        assert sizes(reader.records(start)) == sizes(piece.records)
        assert len(reader.read(41).records) == 0
        assert sizes(reader.last(3).records) == [38, 39, 40]
        assert len(reader.last(100).records) == 16


def test_an_outcome_that_was_lapped_is_refused(recorder: FlightRecorder) -> None:
    index = begin(recorder, 1)
    for size in range(2, 17):
        write(recorder, size)
    assert recorder.end(index, EventState.OK, 0, 0, 0, True)
    write(recorder, 17)
    assert not recorder.end(index, EventState.OK, 0, 0, 0, True)
    assert sizes(recorder.reader().records()) == list(range(2, 18))


def test_a_new_lap_does_not_inherit_outcomes(recorder: FlightRecorder) -> None:
    for size in range(1, 17):
        index = begin(recorder, size)
        recorder.end(index, EventState.FAILED, 9, 9, 9, True, 9, 9, 9, 9, Why.FULL, "old text")
    begin(recorder, 17)
    write(recorder, 18)
    intent, done = list(recorder.reader().read(17).events())
    assert (intent.state, intent.text, intent.why, intent.free, intent.live) == (
        EventState.INTENT, "", None, None, 0,
    )  # fmt: skip
    assert (done.state, done.text, done.why) == (EventState.OK, "", None)


def test_threads_share_the_ring() -> None:
    recorder = FlightRecorder.in_memory(TraceHeader(capacity=4096))
    barrier = threading.Barrier(4)

    def work(base: int) -> None:
        barrier.wait()
        for step in range(1000):
            write(recorder, base + step)

    threads = [threading.Thread(target=work, args=(base,)) for base in (10_000, 20_000, 30_000, 40_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = recorder.reader().records()
    assert sorted(sizes(records)) == [
        base + step for base in (10_000, 20_000, 30_000, 40_000) for step in range(1000)
    ]
    assert records["index"].tolist() == list(range(1, 4001))
    assert (records["live"] == records["size"]).all()


def test_after_closing_nothing_is_recorded_and_nothing_breaks(recorder: FlightRecorder, path: Path) -> None:
    open_index = begin(recorder, 5)
    recorder.close()
    recorder.close()
    assert recorder.closed
    assert recorder.end(open_index, EventState.OK, 0, 0, 0, True)
    assert begin(recorder, 6) == 0
    assert recorder.end(0, EventState.OK, 0, 0, 0, True)
    with FlightRecorderReader(path) as reader:
        assert sizes(reader.records()) == [5]


# -- following -----------------------------------------------------------------------------------------------


def test_a_cursor_gives_each_record_once_when_it_is_done(recorder: FlightRecorder) -> None:
    write(recorder, 1)
    slow = begin(recorder, 2)
    write(recorder, 3)
    cursor = TraceCursor(recorder.reader())
    assert sizes(cursor.advance().records) == [1, 3]
    assert sizes(cursor.outstanding()) == [2]
    assert sizes(cursor.advance().records) == []
    write(recorder, 4)
    recorder.end(slow, EventState.FAILED, 0, 0, 0, True, why=Why.FULL, text="out of memory")
    piece = cursor.advance()
    assert sizes(piece.records) == [2, 4]
    assert [event.text for event in events(piece.records)] == ["out of memory", ""]
    assert len(cursor.outstanding()) == 0
    assert len(cursor.advance().records) == 0


def test_a_cursor_that_was_overtaken_says_so(recorder: FlightRecorder) -> None:
    cursor = TraceCursor(recorder.reader(), 3)
    slow = begin(recorder, 1)
    for size in range(2, 11):
        write(recorder, size)
    assert sizes(cursor.advance().records) == list(range(3, 11))
    slow = begin(recorder, 11)
    assert len(cursor.advance().records) == 0
    for size in range(12, 50):
        write(recorder, size)
    piece = cursor.advance()
    assert sizes(piece.records) == list(range(34, 50))
    assert piece.dropped == 49 - 10 - 16
    assert slow == 11
    assert len(cursor.outstanding()) == 0


def test_following_while_it_is_written(recorder: FlightRecorder) -> None:
    done = threading.Event()

    def work() -> None:
        for size in range(1, 101):
            write(recorder, size)
            time.sleep(0.0005)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    seen: list[int] = []
    dropped = 0
    for piece in TraceCursor(recorder.reader()).follow(interval=0.001, stop=done.is_set):
        seen += sizes(piece.records)
        dropped += piece.dropped
    thread.join()
    assert seen == sorted(set(seen))
    assert seen[-1] == 100
    assert len(seen) + dropped == 100


def test_a_reader_notices_a_new_trace_in_its_place(recorder: FlightRecorder, path: Path) -> None:
    write(recorder, 1)
    reader = recorder.reader()
    assert not reader.replaced
    recorder.close()
    second = FlightRecorder.create(path, TraceHeader(capacity=16))
    write(second, 2)
    assert reader.replaced
    assert sizes(reader.records()) == [1]
    with FlightRecorderReader(path.with_name("trace.previous")) as previous:
        assert sizes(previous.records()) == [1]
    with FlightRecorderReader(path) as current:
        assert sizes(current.records()) == [2]
    second.close()
    path.unlink()
    assert not reader.replaced
    reader.close()


# -- damage --------------------------------------------------------------------------------------------------


def two_laps(path: Path) -> tuple[bytes, bytes, bytes]:
    """One slot in its three states: an old record, the new intent, the new record done."""
    recorder = FlightRecorder.create(path, TraceHeader(capacity=1))
    slots = []
    index = begin(recorder, 1111)
    recorder.end(index, EventState.FAILED, 1, 1, 1, True, 1, 1, 1, 1, Why.CAP, "old error text")
    slots.append(path.read_bytes()[HEADER_BYTES:])
    index = recorder.begin(EventKind.FREE, 2, 2222, 4096, 3, b"async", "kv/b", "engine/y.py:5", ("r2", "r3"))
    slots.append(path.read_bytes()[HEADER_BYTES:])
    recorder.end(index, EventState.OK, 4096, 2, 2, False, 2, 2)
    slots.append(path.read_bytes()[HEADER_BYTES:])
    recorder.close()
    return slots[0], slots[1], slots[2]


def test_a_record_torn_at_any_byte_is_found_out(path: Path) -> None:
    old, intent, done = two_laps(path)
    header = path.read_bytes()[:HEADER_BYTES]

    def read(slot: bytes) -> list[TraceEvent]:
        path.write_bytes(header + slot)
        with FlightRecorderReader(path) as reader:
            return list(events(reader.records()))

    whole = {EventState.INTENT: read(intent), EventState.OK: read(done)}
    assert [event.size for event in whole[EventState.OK]] == [2222]
    asked = {"live", "free", "state", "pool_used", "pool_reserved", "finished_ns", "free_is_read"}
    outcomes = []
    for cut in range(RECORD_BYTES + 1):
        found = read(intent[:cut] + old[cut:])
        # Half written: the old record, nothing, or the intent; never a mixture.
        assert found in ([], whole[EventState.INTENT]) or [event.size for event in found] == [1111]
        outcomes.append(len(found))
        found = read(done[:cut] + intent[cut:])
        (event,) = found  # the request is never lost
        (expected,) = whole[EventState.OK] if event.state is EventState.OK else whole[EventState.INTENT]
        for name in TraceEvent.__slots__:
            if event.state is EventState.TORN and name in asked:
                continue
            assert getattr(event, name) == getattr(expected, name), (cut, name)
    assert 0 in outcomes
    assert 1 in outcomes


def test_a_flipped_bit_is_found_out(path: Path) -> None:
    recorder = FlightRecorder.create(path, TraceHeader(capacity=1))
    index = recorder.begin(EventKind.ALLOC, 1, 2222, 0, 3, b"async", "kv/b", "engine/y.py:5", ("r2", "r3"))
    recorder.end(index, EventState.FAILED, 4096, 2, 2, False, text="out of memory")
    recorder.close()
    data = path.read_bytes()
    with FlightRecorderReader(path) as reader:
        (whole,) = events(reader.records())
    for at in range(RECORD_BYTES):
        damaged = bytearray(data)
        damaged[HEADER_BYTES + at] ^= 1 << random.Random(at).randrange(8)
        path.write_bytes(damaged)
        with FlightRecorderReader(path) as reader:
            piece = reader.read()
        found = list(events(piece.records))
        if found:
            assert found[0].state in (EventState.TORN, EventState.INTENT)
            assert (found[0].size, found[0].tag, found[0].site) == (whole.size, whole.tag, whole.site)
        assert len(found) + piece.torn <= 1


def test_a_damaged_hint_is_not_believed(recorder: FlightRecorder, path: Path) -> None:
    for size in range(1, 41):
        write(recorder, size)
    for hint in (0, 1, 39, 41, 1 << 40, (1 << 64) - 1):
        with path.open("r+b") as file:
            file.seek(4080)
            file.write(hint.to_bytes(8, "little"))
        with FlightRecorderReader(path) as reader:
            expected = list(range(25, 41))
            assert sizes(reader.records()) == expected, hint


# -- files of others -----------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(TraceFileError) as caught:
        FlightRecorderReader(path)
    text = str(caught.value)
    assert str(path) in text
    assert len(text.splitlines()) == 1
    return text


def test_what_is_no_trace_is_refused_in_one_line(path: Path, tmp_path: Path) -> None:
    assert "No such file" in refused(path)
    assert "directory" in refused(tmp_path)
    path.write_bytes(b"")
    assert "too short" in refused(path)
    path.write_bytes(b"GGUF" + bytes(10_000))
    assert "not a flight recorder's file" in refused(path)
    path.write_bytes(os.urandom(HEADER_BYTES))
    refused(path)


def test_a_trace_of_any_other_length_is_refused(recorder: FlightRecorder, path: Path) -> None:
    write(recorder, 1)
    recorder.close()
    data = path.read_bytes()
    for length in (0, 7, 100, 4095, 4096, 4097, len(data) - 1):
        path.write_bytes(data[:length])
        refused(path)
    path.write_bytes(data + b"x")
    assert "truncated or overlong" in refused(path)


def rewritten(data: bytes, change: Any) -> bytes:
    """The trace with its header's JSON changed and the checksum made right."""
    import zlib

    length = int.from_bytes(data[16:20], "little")
    facts = change(json.loads(data[24 : 24 + length]))
    text = facts if isinstance(facts, bytes) else json.dumps(facts).encode()
    header = data[:16] + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    return header.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES] + data[HEADER_BYTES:]


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: {**facts, "capacity": 0},
        lambda facts: {**facts, "capacity": -1},
        lambda facts: {**facts, "capacity": 1 << 60},
        lambda facts: {**facts, "capacity": "16"},
        lambda facts: {**facts, "capacity": True},
        lambda facts: {**facts, "device": 5},
        lambda facts: {**facts, "total": -1},
        lambda facts: {**facts, "pid": 1 << 64},
        lambda facts: {**facts, "fields": facts["fields"][1:]},
        lambda facts: {**facts, "unknown": 1},
        lambda facts: {name: value for name, value in facts.items() if name != "fields"},
        lambda facts: [facts],
        lambda facts: b"{" * 2000,
        lambda facts: b"[" * 3000,
        lambda facts: b"\xff\xfe",
    ],
)
def test_a_hostile_header_is_refused(change: Any, recorder: FlightRecorder, path: Path) -> None:
    write(recorder, 1)
    recorder.close()
    data = path.read_bytes()
    path.write_bytes(rewritten(data, lambda facts: facts))
    with FlightRecorderReader(path) as reader:
        assert sizes(reader.records()) == [1]
    path.write_bytes(rewritten(data, change))
    refused(path)


def test_another_version_says_which(recorder: FlightRecorder, path: Path) -> None:
    recorder.close()
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    assert "format version 9, expected 1" in refused(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(noise=st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES), data=st.data())
def test_noise_in_the_ring_never_breaks_a_reader(noise: bytes, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.unlink(missing_ok=True)
    recorder = FlightRecorder.create(path, TraceHeader(capacity=8))
    for size in range(1, 12):
        write(recorder, size)
    recorder.close()
    slot = data.draw(st.integers(0, 7))
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + slot * RECORD_BYTES)
        file.write(noise)
    with FlightRecorderReader(path) as reader:
        piece = reader.read()
    lost = next(size for size in range(4, 12) if (size - 1) % 8 == slot)
    assert sizes(piece.records) == [size for size in range(4, 12) if size != lost]


def test_a_file_cut_short_while_it_is_read_is_no_signal(recorder: FlightRecorder, path: Path) -> None:
    for size in range(1, 17):
        write(recorder, size)
    with FlightRecorderReader(path) as reader:
        recorder.close()
        os.truncate(path, HEADER_BYTES + 3 * RECORD_BYTES + 100)
        assert sizes(reader.records()) == [1, 2, 3]
        os.truncate(path, 10)
        assert sizes(reader.records()) == []


# -- creation ------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_error_at_creation(path: Path) -> None:
    """The file size limit makes the same call fail as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(TraceFileError, match="cannot create the flight recorder's file of") as caught:
            FlightRecorder.create(path, TraceHeader(capacity=65_536))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(str(caught.value).splitlines()) == 1
    assert list(path.parent.iterdir()) == []


def test_the_blocks_are_reserved_at_creation(path: Path) -> None:
    FlightRecorder.create(path, TraceHeader(capacity=1000)).close()
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size == HEADER_BYTES + 1000 * RECORD_BYTES
    assert status.st_mode & 0o077 == 0


def test_a_trace_never_replaces_what_is_not_one(path: Path, tmp_path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(TraceFileError, match="holds something that is not a trace"):
        FlightRecorder.create(path, TraceHeader(capacity=4))
    assert path.read_text() == "precious"
    with pytest.raises(TraceFileError, match="something else"):
        FlightRecorder.create(tmp_path, TraceHeader(capacity=4))
    with pytest.raises(TraceFileError, match="No such file or directory"):
        FlightRecorder.create(tmp_path / "no" / "trace", TraceHeader(capacity=4))
    path.write_text("")
    FlightRecorder.create(path, TraceHeader(capacity=4)).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["trace"]


def test_one_writer_at_a_time(recorder: FlightRecorder, path: Path) -> None:
    write(recorder, 1)
    with pytest.raises(TraceFileError, match="another process is writing"):
        FlightRecorder.create(path, TraceHeader(capacity=4))
    assert sizes(recorder.reader().records()) == [1]
    recorder.close()
    FlightRecorder.create(path, TraceHeader(capacity=4)).close()


# -- other processes -----------------------------------------------------------------------------------------

WRITER = """
import sys
from engine.memory.house import MemoryHouse
from engine.memory.resources import PlanningMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings
from pathlib import Path

path, records = Path(sys.argv[1]), int(sys.argv[2])
house = MemoryHouse.build(
    PlanningMemoryResource(1 << 50), TraceSettings(trace=True, file=path, records=records)
)
print("ready", flush=True)
held = []
size = 0
with memory_scope("kv/blocks"):
    while True:
        size += 1
        held.append(house.resource.allocate(size))
        if len(held) == 50:
            held.clear()
"""


def start_writer(path: Path, records: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(records)], stdout=subprocess.PIPE, text=True, cwd=TREE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("records", [64, 4096, 65_536])
def test_a_killed_writer_leaves_a_sound_record(records: int, path: Path) -> None:
    process = start_writer(path, records)
    assert process.stdout is not None
    with process, FlightRecorderReader(path) as live:
        # Read while it is written: never a torn record, never one out of place.
        for _ in range(5):
            piece = live.read()
            index = piece.records["index"]
            assert piece.torn <= 1
            assert (np.diff(index) >= 1).all()
        time.sleep(random.uniform(0.01, 0.2))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with FlightRecorderReader(path) as reader:
        assert reader.closed_ns == 0
        assert reader.header.pid == process.pid
        piece = reader.read()
        found = list(events(piece.records))
    assert len(found) > 20
    assert piece.dropped == piece.first - 1
    # One thread: at most the last record is half done, and nothing before it is missing.
    assert piece.torn <= 1
    start = found[0].index
    assert start - piece.first in (0, piece.torn)  # the half-done one may lie where the oldest was
    assert [event.index for event in found] == list(range(start, start + len(found)))
    assert {event.state for event in found[:-1]} == {EventState.OK}
    assert {event.tag for event in found} == {"kv/blocks"}
    live_bytes = found[0].live
    for event in found[1:-1]:
        live_bytes += event.size if event.kind is EventKind.ALLOC else -event.size
        assert event.live == live_bytes
    numbers = [event.sequence for event in found if event.kind is EventKind.ALLOC]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert all(event.size == event.sequence for event in found)


def test_the_request_that_kills_the_process_is_the_last_thing_on_record(path: Path) -> None:
    program = """
import os, signal, sys
from engine.memory.house import MemoryHouse
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope, request_scope
from engine.memory.settings import TraceSettings
from pathlib import Path

class Deadly(HostMemoryResource):
    def acquire(self, size, stream):
        if size == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().acquire(size, stream)

house = MemoryHouse.build(Deadly(1 << 30), TraceSettings(trace=True, file=Path(sys.argv[1])))
kept = house.resource.allocate(5)
with memory_scope("workspace/logits"), request_scope(["cmpl-7"]):
    house.resource.allocate(666)
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=TREE)
    assert done.returncode == -signal.SIGKILL
    with FlightRecorderReader(path) as reader:
        first, last = events(reader.records())
    assert first.state is EventState.OK
    assert (last.state, last.size, last.sequence) == (EventState.INTENT, 666, 2)
    assert (last.tag, last.requests, last.site) == ("workspace/logits", ("cmpl-7",), "<string>:18")
