"""JSON lines bring back what was written, and say which line and field they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.trace.ndjson import NdjsonTrace, encode
from engine.memory.errors import TraceFileError, Why
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from tests.app.trace.making import MIB, TraceMaker, events_of, table_of

HEADER = TraceHeader(capacity=64, device="cuda", api="async", total=24 << 30, pid=7, created_wall_ns=12)

counts = st.integers(0, (1 << 62) - 1)
words = st.integers(0, (1 << 64) - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
some_events = st.builds(
    TraceEvent,
    kind=st.sampled_from(EventKind),
    state=st.sampled_from(EventState),
    size=st.integers(0, 1 << 48),
    index=counts,
    sequence=counts,
    tag=names,
    site=names,
    requests=st.lists(names, max_size=3).map(tuple),
    request_count=st.integers(3, 65535),
    api=names,
    pointer=words,
    live=counts,
    free=st.none() | counts,
    free_is_read=st.booleans(),
    pool_used=st.none() | counts,
    pool_reserved=st.none() | counts,
    stream=words,
    thread=words,
    started_ns=counts,
    finished_ns=counts,
    wall_ns=counts,
    retries=st.integers(0, 65535),
    error_code=st.integers(-(1 << 31), (1 << 31) - 1),
    why=st.none() | st.sampled_from(Why),
    text=names,
)


def read(data: bytes) -> NdjsonTrace:
    return NdjsonTrace.open("t.ndjson", BytesIO(data))


@given(st.lists(some_events, max_size=5))
def test_everything_comes_back(events: list[TraceEvent]) -> None:
    data = b"".join(encode(events, HEADER))
    trace = read(data)
    assert list(trace.events()) == events
    assert trace.header == HEADER
    # A reader of anybody's: each line is a JSON object by itself.
    assert [json.loads(line)["size"] for line in data.splitlines()[1:]] == [event.size for event in events]


def test_recorded_trace_comes_back(make_trace: Callable[..., TraceMaker], tmp_path: Path) -> None:
    maker = make_trace(capacity=8 * MIB)
    maker.allocate("a", 5 * MIB, "kv")
    maker.fail(4 * MIB, "io")
    maker.free("a")
    path = maker.close()
    copy = tmp_path / "copy.ndjson"
    copy.write_bytes(b"".join(encode(events_of(path), HEADER)))
    assert events_of(copy) == events_of(path)
    one, other = table_of(path), table_of(copy)
    for column in ("kind", "outcome", "sequence", "size", "live", "started", "finished", "tag", "site"):
        assert (getattr(one, column) == getattr(other, column)).all(), column
    assert (one.tags, one.sites, one.remarkable) == (other.tags, other.sites, other.remarkable)


def test_lines_without_a_header_are_read() -> None:
    """As ``/debug/alloc`` gives them, also those that know no state."""
    lines = [
        b'{"kind":"failed","of":"free","size":5}',
        b"",
        b'{"kind":"pending","of":"alloc","size":6}',
        b'{"kind":"note"}',
    ]
    found = [(event.kind, event.state, event.size) for event in read(b"\n".join(lines)).events()]
    assert found == [
        (EventKind.FREE, EventState.FAILED, 5),
        (EventKind.ALLOC, EventState.INTENT, 6),
        (EventKind.NOTE, EventState.OK, 0),
    ]
    assert read(b'{"kind":"alloc","size":1,"api":"async"}').header.device == "cuda"
    assert list(read(b"").events()) == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b'{"kind":"alloc","size":-1}', "line 1: not a record: Expected `int` >= 0 - at `$.size`"),
        (b'{"kind":"alloc"}\n{"kind":"allok"}', "line 2: kind='allok': expected one of alloc, free"),
        (b'{"kind":"alloc"}\n[1]', "line 2: not a record: Expected `object`, got `array`"),
        (b'{"kind":"alloc"}\n{"kind":', "line 2: not a JSON object"),
        (b'{"kind":"alloc"}\n\xff\xfe', "line 2: not a JSON object"),
        (b'{"kind":"alloc","why":"bored"}', "line 1: why='bored': expected one of full"),
        (b'{"kind":"alloc","state":"fine"}', "line 1: state='fine': expected one of intent"),
        (
            b'{"kind":"alloc","size":999999999999999999}',
            "line 1: size='999999999999999999': expected 281474976710656",
        ),
        (
            b'{"kind":"alloc","pointer":36893488147419103232}',
            "pointer='36893488147419103232': expected at most 64 bits",
        ),
        (b'{"kind":"alloc","index":"one"}', "line 1: not a record: Expected `int`, got `str` - at `$.index`"),
        (b'{"kind":"header","total":"all"}', "line 1: "),
        (b'{"kind":"alloc","text":"' + b"x" * (1 << 20), "line 1: longer than 1048576 bytes, so no record"),
        (b'{"kind":"alloc","size":' + b"[" * 100000, "line 1: not a"),
    ],
)
def test_bad_line_is_named(lines: bytes, said: str) -> None:
    with pytest.raises(TraceFileError) as caught:
        list(read(lines).events())
    text = str(caught.value)
    assert text.startswith("t.ndjson: ")
    assert said in text
    assert len(text.splitlines()) == 1
    assert len(text) < 300


@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from([b'{"kind":"alloc"', b',"size":1', b"}", b"\n", b'"', b"\\ud800"])).map(
        b"".join
    )
)
def test_any_bytes_are_events_or_one_line(data: bytes) -> None:
    said = ""
    try:
        assert all(isinstance(event, TraceEvent) for event in read(data).events())
    except TraceFileError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
