"""The pickle is a memory snapshot to torch's own tools, and keeps the rules that its viewer relies on."""

from __future__ import annotations

import importlib.util
import pickle
import pickletools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from app.trace.exporters import EXPORTERS
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from tests.app.trace.making import MIB, events_of, traces

HEADER = TraceHeader(capacity=1, device="cuda", api="malloc")

# What unpickle() of torch/utils/viz/MemoryViz.js has a case for.
VIEWER_OPCODES = {
    "APPENDS",
    "BINGET",
    "BININT",
    "BININT1",
    "BININT2",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "FRAME",
    "LONG1",
    "LONG_BINGET",
    "MARK",
    "MEMOIZE",
    "PROTO",
    "SETITEMS",
    "SHORT_BINUNICODE",
    "STOP",
    "TUPLE2",
    "APPEND",
    "NEWFALSE",
    "BINPUT",
    "BINUNICODE",
    "EMPTY_TUPLE",
    "NEWTRUE",
    "NONE",
    "BINFLOAT",
    "TUPLE",
    "TUPLE1",
    "TUPLE3",
    "LONG_BINPUT",
    "LIST",
    "DICT",
    "SETITEM",
}


def encoded(events: list[TraceEvent]) -> bytes:
    return b"".join(EXPORTERS["torch-snapshot"].encode(events, HEADER))


def snapshot_of(events: list[TraceEvent]) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(encoded(events))
    return found


@pytest.fixture(scope="module")
def memory_viz() -> ModuleType:
    """torch/cuda/_memory_viz.py, which needs nothing of torch, so torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "cuda" / "_memory_viz.py"
        if path.is_file():
            found = importlib.util.spec_from_file_location("_memory_viz", path)
            assert found is not None
            assert found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            return module
    pytest.skip("torch is not installed: its torch/cuda/_memory_viz.py cannot open the snapshot")


def test_torchs_own_functions_open_it(memory_viz: ModuleType, loaded: SimpleNamespace) -> None:
    snapshot = snapshot_of(events_of(loaded.path))
    summary = memory_viz.segsum(snapshot)  # raises where blocks do not tile their segment
    assert "segments: 3\n" in summary
    assert "total_reserved: 170.0MiB\ntotal_allocated: 170.0MiB\ntotal_free: 0.0B\n" in summary
    trace = memory_viz.trace(snapshot)
    assert "raise OutOfMemoryError # 64.0MiB requested, 30.0MiB free in CUDA\n" in trace
    assert trace.count("cudaMalloc(") == 5
    assert trace.count("cudaFree(") == 2
    flames = memory_viz.memory(snapshot, format_flamegraph=str)
    assert "stream_0;active_allocated;making.py:" in flames
    assert f":kv {100 * MIB}\n" in flames
    assert memory_viz.segments(snapshot, format_flamegraph=str).count("\n") == 3
    assert len(memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]) < 15
    assert "snapshot.pickle" in memory_viz.trace_plot(snapshot)


@given(traces())
def test_rules_of_the_viewer(events: list[TraceEvent]) -> None:
    snapshot = snapshot_of(events)
    (trace,) = snapshot["device_traces"]
    segments: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for place, entry in enumerate(trace):
        action, address, size = entry["action"], entry.get("addr"), entry["size"]
        assert size > 0
        assert [frame["name"] for frame in entry["frames"]]
        match action:
            case "segment_alloc":
                assert segments.setdefault(address, size) is size
            case "alloc":
                assert segments[address] == size
                assert blocks.setdefault(address, size) is size
            case "free_requested":
                # The viewer makes one event of a request that its completion follows at once.
                assert (trace[place + 1]["action"], trace[place + 1]["addr"]) == ("free_completed", address)
            case "free_completed":
                assert blocks.pop(address) == size
            case "segment_free":
                assert address not in blocks
                assert segments.pop(address) == size
            case _:
                assert (action, "device_free" in entry) == ("oom", True)
    assert {segment["address"]: segment["total_size"] for segment in snapshot["segments"]} == segments
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert segment["allocated_size"] == segment["active_size"] == segment["total_size"]
        at = segment["address"]
        for block in segment["blocks"]:
            assert (block["address"], block["state"]) == (at, "active_allocated")
            assert block["requested_size"] <= block["size"]
            at += block["size"]
    addresses = [segment["address"] for segment in snapshot["segments"]]
    assert addresses == sorted(addresses)
    assert sum(blocks.values()) == (events[-1].live if events else 0)


@given(traces())
def test_protocol_4_with_the_viewers_opcodes_and_plain_types(events: list[TraceEvent]) -> None:
    data = encoded(events)
    opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(data)]
    assert opcodes[0] == ("PROTO", 4)
    assert {name for name, _ in opcodes} <= VIEWER_OPCODES
    assert pickle.loads(pickle.dumps(pickle.loads(data), 4)) == pickle.loads(data)


def test_names_beyond_the_memo_and_long_ones() -> None:
    events = []
    for number in range(70_000):
        event = TraceEvent(EventKind.ALLOC, EventState.OK, 1, tag=f"kv/{number}", pointer=1 + number)
        event.site = f"{'x' * (300 if number == 5 else 1)}.py:{number}"
        events.append(event)
    (trace,) = snapshot_of(events)["device_traces"]
    allocs = trace[1::2]
    assert [entry["frames"][0]["name"] for entry in allocs] == [event.tag for event in events]
    assert allocs[5]["frames"][0] == {"filename": "x" * 300 + ".py", "line": 5, "name": "kv/5"}
    assert allocs[69_999]["frames"][0]["line"] == 69_999


@pytest.mark.parametrize("value", [0, 255, 256, 65_535, 65_536, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_integers(value: int) -> None:
    event = TraceEvent(EventKind.ALLOC, EventState.OK, 7, pointer=value, site="no line")
    for entry in snapshot_of([event, event])["device_traces"][0]:
        assert entry["addr"] == value
        assert entry["frames"] == [{"filename": "no line", "line": 0, "name": "other"}]
