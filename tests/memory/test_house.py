from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from cuda.core import MemoryResource

from engine.memory.adaptors import LimitingMemoryResource, StatisticsMemoryResource, TracingMemoryResource
from engine.memory.errors import OutOfMemoryError, TraceFileError, Why
from engine.memory.house import MemoryHouse
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import EventState, events
from engine.memory.resources import HostMemoryResource, PlanningMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings

MIB = 1 << 20
ON = TraceSettings(trace=True, stats=True)


def test_off_is_absent() -> None:
    host = HostMemoryResource(MIB)
    house = MemoryHouse.build(host, TraceSettings(), output=io.StringIO())
    assert house.resource is host
    assert (house.tracing, house.statistics, house.limiting, house.recorder, house.lines) == (None,) * 5
    assert house.last_lines() == []
    assert house.statistics_dict() is None
    house.close()


def test_both_arms_in_one_process() -> None:
    """Nothing is process-wide: a traced house beside one that is not."""
    output = io.StringIO()
    off = MemoryHouse.build(HostMemoryResource(MIB), TraceSettings(), output=output)
    on = MemoryHouse.build(HostMemoryResource(MIB), ON, output=output)
    off.resource.allocate(10).close()
    assert output.getvalue() == ""
    on.resource.allocate(20).close()
    assert output.getvalue().count("\n") == 2
    assert on.tracing is not None
    assert on.tracing.allocations == 1


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("limit", [None, MIB])
@pytest.mark.parametrize("trace", [False, True])
def test_the_order_of_the_floors(trace: bool, stats: bool, limit: int | None) -> None:
    host = HostMemoryResource(MIB)
    house = MemoryHouse.build(host, TraceSettings(trace=trace, stats=stats), limit=limit)
    floors: list[type] = []
    resource: Any = house.resource
    while resource is not host:
        floors.append(type(resource))
        resource = resource.upstream
    expected = [
        floor
        for floor, built in [
            (TracingMemoryResource, trace),
            (StatisticsMemoryResource, stats),
            (LimitingMemoryResource, limit is not None),
        ]
        if built
    ]
    assert floors == expected
    assert (house.tracing is not None, house.recorder is not None) == (trace, trace)


def test_tracing_on_records_and_prints() -> None:
    """Fails if tracing is forced off, however that is done."""
    output = io.StringIO()
    house = MemoryHouse.build(HostMemoryResource(100 * MIB), TraceSettings(trace=True), output=output)
    assert house.resource is house.tracing
    with memory_scope("weights/a"):
        house.resource.allocate(20 * MIB).close()
    assert house.recorder is not None
    recorded = house.recorder.reader().records()
    assert recorded["size"].tolist() == [20 * MIB] * 2
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["[host-alloc]", "[host-free]"]
    assert lines == house.last_lines()


def test_a_limit_refuses_under_the_trace() -> None:
    output = io.StringIO()
    house = MemoryHouse.build(HostMemoryResource(10 * MIB), ON, output=output, limit=4 * MIB)
    assert house.available == 4 * MIB
    with memory_scope("kv"), pytest.raises(OutOfMemoryError) as caught:
        house.resource.allocate(5 * MIB)
    error = caught.value
    assert (error.why, error.sequence, error.tag, error.free) == (Why.CAP, 1, "kv", 10 * MIB)
    assert "FAILED #1" in output.getvalue()
    assert "why=cap" in output.getvalue()
    assert house.statistics is not None
    assert house.statistics.statistics().failures_by_why == {"cap": 1}
    wide = MemoryHouse.build(HostMemoryResource(10), TraceSettings(), limit=100)
    assert wide.available == 10


@pytest.mark.parametrize("settings", [TraceSettings(trace=True), TraceSettings(stats=True), ON])
def test_the_ledger_is_by_tag_and_closes_without_residual(settings: TraceSettings) -> None:
    house = MemoryHouse.build(HostMemoryResource(100 * MIB), settings)
    with memory_scope("weights/a"):
        weights = house.resource.allocate(10 * MIB)
    with memory_scope("weights/b"):
        more = house.resource.allocate(MIB)
    with memory_scope("kv"):
        cache = house.resource.allocate(30 * MIB)
        house.resource.allocate(MIB).close()
    ledger = house.ledger("after load")
    assert ledger.tags == {"weights/a": 10 * MIB, "weights/b": MIB, "kv": 30 * MIB}
    assert list(ledger.segments.items()) == [("kv", 30 * MIB), ("weights", 11 * MIB)]
    assert (ledger.total, ledger.free, ledger.residual) == (100 * MIB, 59 * MIB, 0)
    for buffer in (weights, more, cache):
        buffer.close()
    assert house.ledger().tags == {}
    assert house.ledger().free == 100 * MIB


def test_without_anybody_watching_all_of_it_is_residual() -> None:
    house = MemoryHouse.build(HostMemoryResource(100), TraceSettings())
    kept = house.resource.allocate(40)
    assert (house.ledger().tags, house.ledger().residual) == ({}, 40)
    kept.close()


def test_a_ledger_is_taken_even_when_the_device_cannot_be_asked(device: Any) -> None:
    house = MemoryHouse.build(device, ON)
    with memory_scope("kv"):
        kept = house.resource.allocate(100)
    device.neighbours = 7
    device.fail_reading = RuntimeError("context lost")
    ledger = house.ledger("at failure")
    assert not ledger.free_is_read
    assert (ledger.free, ledger.residual) == (device.total - 107, 0)
    kept.close()


def test_the_file_outlives_the_house(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    settings = TraceSettings(trace=True, file=path, records=64, min_bytes=5, low_free_bytes=6)
    house = MemoryHouse.build(HostMemoryResource(MIB), settings)
    buffer = house.resource.allocate(10)
    house.close()
    house.close()
    buffer.close()  # later than the recorder
    with FlightRecorderReader(path) as reader:
        header = reader.header
        assert (header.capacity, header.device, header.api, header.total) == (64, "host", "host", MIB)
        assert (header.min_bytes, header.low_free_bytes) == (5, 6)
        (event,) = events(reader.records())
    assert (event.size, event.state) == (10, EventState.OK)
    assert house.last_lines() == []


def test_a_file_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    settings = TraceSettings(trace=True, file=tmp_path / "no" / "trace")
    with pytest.raises(TraceFileError, match="no/trace: cannot create"):
        MemoryHouse.build(HostMemoryResource(MIB), settings)


def test_the_last_lines_show_what_was_not_printed() -> None:
    output = io.StringIO()
    settings = TraceSettings(trace=True, low_free_bytes=0)
    house = MemoryHouse.build(HostMemoryResource(MIB), settings, output=output)
    for size in range(5):
        house.resource.allocate(size).close()
    assert output.getvalue() == ""
    assert len(house.last_lines(3)) == 3
    assert house.last_lines(3)[-1].startswith("[host-free]  size=0.0 MiB")
    assert len(house.last_lines()) == 10


def test_the_counts_are_json() -> None:
    house = MemoryHouse.build(HostMemoryResource(MIB), ON)
    house.resource.allocate(5).close()
    facts = json.loads(json.dumps(house.statistics_dict()))
    assert facts["total"]["allocations"] == facts["total"]["frees"] == 1


def test_a_resource_that_cannot_be_asked_needs_a_gauge(device: Any) -> None:
    class Plain(MemoryResource):  # type: ignore[misc]
        is_device_accessible = False
        is_host_accessible = True
        device_id = -1

    plain = Plain()
    with pytest.raises(TypeError, match="Plain cannot tell its free bytes"):
        MemoryHouse.build(plain, TraceSettings())
    assert MemoryHouse.build(plain, TraceSettings(), gauge=device).resource is plain


def test_what_several_requests_can_have_leaves_room_for_rounding() -> None:
    granular = PlanningMemoryResource(64 * MIB, granularity=2 * MIB)
    house = MemoryHouse.build(granular, TraceSettings(), limit=60 * MIB)
    available = house.available_in(10)
    assert available == 64 * MIB - 10 * (2 * MIB - 1)
    buffers = [house.resource.allocate(available // 10) for _ in range(10)]
    assert granular.read_free() >= 0
    for buffer in buffers:
        buffer.close()
    assert MemoryHouse.build(granular, TraceSettings(), limit=16 * MIB).available_in(10) == 16 * MIB
    exact = MemoryHouse.build(HostMemoryResource(64 * MIB), TraceSettings())
    assert exact.available_in(10) == exact.available
