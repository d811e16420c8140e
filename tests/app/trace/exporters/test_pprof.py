"""The profile is google/pprof's, by its own reader where Go is installed, and field by field always."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from app.trace.exporters import EXPORTERS
from engine.memory.errors import TraceFileError
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from tests.app.trace.making import MIB, events_of, traces

pytest.importorskip("google.protobuf", reason="protobuf is not installed")

from app.trace.exporters.pprof import profile_class

HEADER = TraceHeader(
    capacity=1, device="cuda", api="malloc", total=24 << 30, created_wall_ns=1_700_000_000 * 10**9
)


def encoded(events: list[TraceEvent]) -> bytes:
    return b"".join(EXPORTERS["pprof"].encode(events, HEADER))


def decoded(events: list[TraceEvent]) -> Any:
    profile = profile_class()()
    profile.ParseFromString(gzip.decompress(encoded(events)))
    return profile


def samples(profile: Any) -> dict[tuple[str, str], dict[str, int]]:
    """Values by tag and site, out of the stacks, as pprof finds them."""
    strings = profile.string_table
    functions = {function.id: strings[function.name] for function in profile.function}
    lines = {place.id: functions[place.line[0].function_id] for place in profile.location}
    types = [strings[kind.type] for kind in profile.sample_type]
    found = {}
    for sample in profile.sample:
        site, tag, *above = (lines[place] for place in sample.location_id)
        assert above == ([tag.partition("/")[0]] if "/" in tag else [])
        assert [(strings[label.key], strings[label.str]) for label in sample.label] == [("tag", tag)]
        found[tag, site] = dict(zip(types, sample.value, strict=True))
    return found


@given(traces())
def test_values_are_those_of_a_plain_count(events: list[TraceEvent]) -> None:
    expected: dict[str, Counter[tuple[str, str]]] = {
        name: Counter() for name in ("alloc_objects", "alloc_space", "inuse_objects", "inuse_space")
    }
    peak: Counter[tuple[str, str]] = Counter()
    most = 0
    for event in events:
        key, sign = (event.tag, event.site), 1 if event.kind is EventKind.ALLOC else -1
        if event.state is not EventState.OK or event.kind > EventKind.FREE:
            continue
        if sign > 0:
            expected["alloc_objects"][key] += 1
            expected["alloc_space"][key] += event.size
        expected["inuse_objects"][key] += sign
        expected["inuse_space"][key] += sign * event.size
        if event.live > most:
            most, peak = event.live, Counter(expected["inuse_space"])
    found = samples(decoded(events))
    assert set(found) == set(expected["alloc_objects"])
    for key, values in found.items():
        for name, counts in expected.items():
            assert values[name] == counts[key], name
        assert values["peak_space"] == peak[key]


def test_rules_of_the_format(loaded: SimpleNamespace) -> None:
    events = events_of(loaded.path)
    profile = decoded(events)
    strings = profile.string_table
    assert strings[0] == ""
    assert len(set(strings)) == len(strings)
    assert [(strings[kind.type], strings[kind.unit]) for kind in profile.sample_type] == [
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
        ("peak_space", "bytes"),
    ]
    assert strings[profile.default_sample_type] == "inuse_space"
    assert [mapping.id for mapping in profile.mapping] == [1]
    assert {place.mapping_id for place in profile.location} == {1}
    ids = [place.id for place in profile.location]
    assert sorted(set(ids)) == sorted(ids)
    assert 0 not in ids
    assert profile.time_nanos == HEADER.created_wall_ns
    assert profile.duration_nanos > 0
    leaf = profile.sample[0].location_id[0]
    function = next(function for function in profile.function if function.id == leaf)
    assert strings[function.filename] == "tests/app/trace/making.py"
    assert function.start_line > 0


def test_numbers_of_the_fields_are_the_formats() -> None:
    """Decoded without a schema: field numbers on the wire against those of google/pprof's profile.proto."""
    event = TraceEvent(EventKind.ALLOC, EventState.OK, 300, tag="kv/a", site="m.py:7", pointer=1)
    event.started_ns, event.finished_ns = 5, 9
    text = wire_fields(gzip.decompress(encoded([event])))
    assert sorted({number for number, _ in text}) == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14]
    strings = [value.decode() for number, value in text if number == 6]
    (sample,) = (wire_fields(value) for number, value in text if number == 2)
    assert dict(sample)[1] == bytes([1, 2, 3])
    assert dict(sample)[2] == bytes([1, 0xAC, 0x02, 1, 0xAC, 0x02, 0xAC, 0x02])
    label = dict(wire_fields(dict(sample)[3]))
    assert (strings[label[1]], strings[label[2]]) == ("tag", "kv/a")
    location = dict(wire_fields(next(value for number, value in text if number == 4)))
    assert (location[1], location[2], dict(wire_fields(location[4]))) == (1, 1, {1: 1, 2: 7})
    function = dict(wire_fields(next(value for number, value in text if number == 5)))
    assert (strings[function[2]], strings[function[4]], function[5]) == ("m.py:7", "m.py", 7)


def wire_fields(data: bytes) -> list[tuple[int, Any]]:
    """Field numbers and values of a protobuf message: integers and bytes."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    fields: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
            fields.append((key >> 3, value))
        else:
            assert key & 7 == 2
            length, at = varint(at)
            fields.append((key >> 3, data[at : at + length]))
            at += length
    return fields


def test_sizes_that_do_not_fit_are_told() -> None:
    huge = TraceEvent(EventKind.ALLOC, EventState.OK, 1 << 62, tag="kv")
    with pytest.raises(TraceFileError, match="add up to more than 64 bits"):
        encoded([huge, huge])


def test_googles_pprof_opens_it(loaded: SimpleNamespace, tmp_path: Path) -> None:
    go = shutil.which("go")
    pprof = [go, "tool", "pprof"] if go else [shutil.which("pprof")]
    if pprof[0] is None:
        pytest.skip("neither go nor pprof is installed: google/pprof cannot open the profile")
    path = tmp_path / "profile.pb.gz"
    path.write_bytes(encoded(events_of(loaded.path)))

    def top(index: str) -> str:
        command = [*pprof, "-top", "-unit=MB", f"-sample_index={index}", path]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    assert f"Total samples = {loaded.peak // MIB}MB" in top("peak_space")
    held = top("inuse_space")
    assert f"Total samples = {loaded.live // MIB}MB" in held
    assert "tests/app/trace/making.py:" in held
    assert "kv" in held
