"""Snapshots as torch makes them become traces with the right sums; others are refused in a line."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from app.trace.exporters import EXPORTERS
from app.trace.importers import import_trace
from app.trace.importers.torch_snapshot import read_snapshot
from app.trace.summary import summarize
from engine.errors import ConfigurationError
from engine.memory.errors import TraceFileError, Why
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from tests.app.trace.making import MIB, events_of, table_of_events, traces

PYTHON = {"filename": "/srv/model.py", "line": 12, "name": "forward"}
TORCH = {"filename": "/usr/lib/python3/site-packages/torch/nn/functional.py", "line": 2371, "name": "linear"}
NATIVE = {"filename": "??", "line": 0, "name": "at::native::empty_cuda"}
FRAMES = [NATIVE, TORCH, PYTHON]


def entry(action: str, addr: int, size: int, time_us: int, **more: Any) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": FRAMES,
        **more,
    }


def segment(address: int, *blocks: tuple[int, str], device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "stream": 0,
        "segment_type": "large",
        "blocks": [
            {"size": size, "requested_size": size - 24, "state": state, "frames": FRAMES}
            for size, state in blocks
        ],
    }


def snapshot() -> dict[str, Any]:
    """A 20 MiB segment made before the history begins, and a 32 MiB one in it."""
    return {
        "segments": [
            segment(0x1000000, (4 * MIB, "active_allocated"), (16 * MIB, "inactive")),
            segment(0x9000000, (8 * MIB, "active_allocated"), (24 * MIB, "inactive")),
        ],
        "device_traces": [
            [
                entry("free_requested", 0x1400000, 2 * MIB, 100),
                entry("free_completed", 0x1400000, 2 * MIB, 101),
                entry("segment_alloc", 0x9000000, 32 * MIB, 102),
                entry("alloc", 0x9000000, 8 * MIB, 103),
                entry("alloc", 0x9800000, 10 * MIB, 104),
                entry("free_requested", 0x9800000, 10 * MIB, 105),
                entry("snapshot", 0, 0, 106),
                entry("free_completed", 0x9800000, 10 * MIB, 107),
                {
                    "action": "oom",
                    "size": 64 * MIB,
                    "device_free": 30 * MIB,
                    "stream": 0,
                    "frames": [],
                    "time_us": 108,
                },
            ],
            [],
        ],
        "allocator_settings": {"max_split_size": -1},
        "external_annotations": [],
    }


def read(value: object, **options: Any) -> list[TraceEvent]:
    return list(read_snapshot("s.pickle", pickle.dumps(value), **options)[1])


def test_history_with_what_is_older_before_it() -> None:
    events = read(snapshot())
    assert [
        (event.kind.name, event.state.name, event.size, event.live, event.sequence) for event in events
    ] == [
        ("ALLOC", "OK", 4 * MIB - 24, 4 * MIB - 24, 1),
        ("ALLOC", "OK", 2 * MIB, 6 * MIB - 24, 2),
        ("FREE", "OK", 2 * MIB, 4 * MIB - 24, 2),
        ("ALLOC", "OK", 8 * MIB, 12 * MIB - 24, 3),
        ("ALLOC", "OK", 10 * MIB, 22 * MIB - 24, 4),
        ("FREE", "OK", 10 * MIB, 12 * MIB - 24, 4),
        ("ALLOC", "FAILED", 64 * MIB, 12 * MIB - 24, 5),
    ]
    assert [event.pool_reserved for event in events] == [20 * MIB] * 3 + [52 * MIB] * 4
    assert {(event.tag, event.site) for event in events[:-1]} == {("other/forward", "/srv/model.py:12")}
    assert (events[-1].why, events[-1].free, events[-1].site) == (Why.FULL, 30 * MIB, "")
    assert [event.wall_ns for event in events[:3]] == [100_000, 100_000, 101_000]
    found = summarize(table_of_events(events))
    assert (found.peak, found.before, found.at_peak_unknown) == (22 * MIB - 24, 0, 0)


def test_what_was_asked_of_the_driver() -> None:
    events = read(snapshot(), segments=True)
    assert [(event.kind.name, event.size, event.live) for event in events] == [
        ("ALLOC", 20 * MIB, 20 * MIB),
        ("ALLOC", 32 * MIB, 52 * MIB),
        ("ALLOC", 64 * MIB, 52 * MIB),
    ]


def test_segments_alone_and_no_history() -> None:
    blocks = [segment(0x1000, (512, "active_allocated"), (512, "active_awaiting_free"), (1024, "inactive"))]
    for value in (blocks, {"segments": blocks}, {"segments": blocks, "device_traces": [[]]}):
        assert [(event.pointer, event.size) for event in read(value)] == [(0x1000, 488), (0x1200, 488)]
    assert read({"segments": [], "device_traces": []}) == []


def test_devices() -> None:
    value = snapshot()
    value["segments"].append(segment(0x5000, (MIB, "active_allocated"), device=1))
    with pytest.raises(ConfigurationError, match=r"^--device: s.pickle has several: expected one of 0, 1$"):
        read(value)
    assert len(read(value, device=0)) == 7
    assert [event.size for event in read(value, device=1)] == [MIB - 24]
    with pytest.raises(ConfigurationError, match=r"^--device 2: expected one of 0, 1$"):
        read(value, device=2)


@given(traces(least_size=1))
def test_what_was_exported_comes_back(events: list[TraceEvent]) -> None:
    """The two ways agree with each other on every figure that a snapshot can hold."""
    data = b"".join(EXPORTERS["torch-snapshot"].encode(events, TraceHeader(capacity=1)))
    _, found = read_snapshot("s", data)
    kept = [event for event in events if event.kind is not EventKind.NOTE]

    def facts(event: TraceEvent) -> tuple[Any, ...]:
        names = (event.tag, event.site, event.kind, event.state, event.size, event.live)
        return (*names, event.sequence, event.wall_ns, event.stream)

    assert [facts(event) for event in found] == [facts(event) for event in kept]


def test_recorded_trace_through_the_file(loaded: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    with path.open("wb") as out:
        EXPORTERS["torch-snapshot"].export(events_of(loaded.path), TraceHeader(capacity=1), out)
    with import_trace(path) as (header, events):
        assert (header.device, header.api) == ("cuda", "torch")
        found = summarize(table_of_events(list(events)))
    assert (found.peak, found.live, found.peak_sequence) == (loaded.peak, loaded.live, 5)
    assert found.failure is not None
    assert (found.failure.state, found.failure.size) == (EventState.FAILED, 64 * MIB)


def bomb() -> bytes:
    """Lists that refer to one another: a thousand times a thousand entries in a few kilobytes."""
    row = [entry("alloc", 1, 1, 1)] * 1000
    return pickle.dumps({"segments": [], "device_traces": [row] * 1000})


def frames_bomb() -> bytes:
    frames = [NATIVE] * 3000
    return pickle.dumps(
        {"device_traces": [[{"action": "alloc", "size": 1, "frames": frames} for _ in range(3000)]]}
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "no memory snapshot: expected a dictionary with segments and device_traces"),
        ({}, "no memory snapshot"),
        ({"segments": 5}, "segments: expected a list, got int"),
        ({"segments": [5]}, "segments[0]: Expected `object`, got `int`"),
        ({"segments": [{"address": 1}]}, "segments[0]: Object missing required field `total_size`"),
        ({"device_traces": [5]}, "device_traces[0]: expected a list, got int"),
        ({"device_traces": [[{"size": 1}]]}, "device_traces[0][0]: Object missing required field `action`"),
        (
            {"device_traces": [[entry("alloc", 1, -1, 1)]]},
            "device_traces[0][0]: Expected `int` >= 0 - at `$.size`",
        ),
        ({"device_traces": [[entry("alloc", 1 << 70, 1, 1)]]}, "device_traces[0][0]: "),
        ({"device_traces": [[entry("alloc", 1, 1, 1, frames=[7])]]}, "frames: Expected `object`, got `int`"),
        ({"device_traces": [[{1: 2}]]}, "device_traces[0][0]: "),
    ],
)
def test_other_values_are_told_in_a_line(value: object, said: str) -> None:
    with pytest.raises(TraceFileError) as caught:
        read(value)
    assert str(caught.value).startswith("s.pickle: ")
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_small_file_cannot_ask_for_much() -> None:
    with pytest.raises(ConfigurationError, match=r"one of 0, 1, 2, 3, 4, 5, 6, 7, …$"):
        read_snapshot("s", bomb())
    assert len(read(pickle.loads(bomb()), device=999)) == 1000
    many = segment(1, *[(512, "active_allocated")] * 2000)
    with pytest.raises(TraceFileError, match=r"^s: blocks: more entries than the file has bytes$"):
        list(read_snapshot("s", pickle.dumps([many] * 2000))[1])
    _, events = read_snapshot("s", frames_bomb())
    assert sum(1 for _ in events) == 3000
