"""Adaptors alone and stacked, over a device that records its own calls."""

from __future__ import annotations

import gc
import io
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.core import Buffer, MemoryResource

from engine.memory.adaptors import (
    Fault,
    FaultInjectingMemoryResource,
    LimitingMemoryResource,
    StatisticsMemoryResource,
    TracingMemoryResource,
    cap_of,
    gauge_of,
)
from engine.memory.base import MemoryDeallocationWarning
from engine.memory.errors import (
    AllocationError,
    AllocationRequest,
    OutOfMemoryError,
    StickyDeviceError,
    UnknownPointerError,
    Why,
)
from engine.memory.lines import LineWriter
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader
from engine.memory.recorder import FlightRecorder
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope, request_scope

MIB = 1 << 20
GIB = 1 << 30

Wrap = Callable[[MemoryResource], Any]
WRAPS: dict[str, Wrap] = {
    "tracing": lambda upstream: TracingMemoryResource(
        upstream, FlightRecorder.in_memory(TraceHeader(capacity=4096))
    ),
    "statistics": StatisticsMemoryResource,
    "limiting": lambda upstream: LimitingMemoryResource(upstream, 1 << 60),
    "fault": FaultInjectingMemoryResource,
}
STACKS = [stack for length in (1, 2, 3, 4) for stack in itertools.permutations(WRAPS, length) if length != 3]


def build(stack: tuple[str, ...], bottom: MemoryResource) -> list[Any]:
    """Adaptors over `bottom`, the outermost first."""
    layers: list[Any] = []
    resource: Any = bottom
    for name in reversed(stack):
        resource = WRAPS[name](resource)
        layers.insert(0, resource)
    return layers


def recorded(recorder: FlightRecorder) -> list[TraceEvent]:
    return list(recorder.reader().read().events())


# -- stacking ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS, ids="-".join)
def test_every_order_gives_the_same_counts(stack: tuple[str, ...], make_device: Any) -> None:
    device = make_device(100 * MIB)
    layers = build(stack, device)
    outermost = layers[0]
    with memory_scope("weights/a"):
        weights = [outermost.allocate(10 * MIB) for _ in range(3)]
    with memory_scope("kv"):
        cache = outermost.allocate(50 * MIB)
        with pytest.raises(OutOfMemoryError):
            outermost.allocate(30 * MIB)
    weights.pop().close()
    del weights[-1]
    gc.collect()
    device.fail_next = StickyDeviceError(AllocationRequest(size=1, why=Why.EARLIER_ERROR))
    with pytest.raises(StickyDeviceError):
        outermost.allocate(1)

    assert device.acquired == [10 * MIB] * 3 + [50 * MIB]
    assert [size for _, size in device.released] == [10 * MIB] * 2
    assert device.live == 60 * MIB
    for layer in layers:
        if isinstance(layer, TracingMemoryResource):
            assert (layer.allocations, layer.frees, layer.failures) == (4, 2, 2)
            assert (layer.live, layer.peak) == (60 * MIB, 80 * MIB)
            assert layer.live_by_tag() == {"weights/a": 10 * MIB, "kv": 50 * MIB}
        elif isinstance(layer, StatisticsMemoryResource):
            counts = layer.statistics()
            total = counts.total
            assert (total.allocations, total.frees, total.failures) == (4, 2, 2)
            assert (total.live_bytes, total.peak_bytes, total.live_blocks) == (60 * MIB, 80 * MIB, 2)
            assert (total.allocated_bytes, total.freed_bytes) == (80 * MIB, 20 * MIB)
            assert layer.live_by_tag() == {"weights/a": 10 * MIB, "kv": 50 * MIB}
            assert counts.by_tag["kv"].failures == 1
            assert counts.by_tag["weights/a"].peak_bytes == 30 * MIB
            assert counts.failures_by_why == {"full": 1, "earlier-error": 1}
        elif isinstance(layer, LimitingMemoryResource):
            assert layer.live == 60 * MIB

    cache.close()
    weights.clear()
    gc.collect()
    assert device.live == 0
    assert len(device.released) == 4
    for layer in layers:
        if hasattr(layer, "live"):
            assert layer.live == 0


@pytest.mark.parametrize("stack", STACKS, ids="-".join)
def test_a_buffer_belongs_to_the_layer_that_was_asked(stack: tuple[str, ...], device: Any) -> None:
    layers = build(stack, device)
    buffer = layers[0].allocate(100)
    assert buffer.memory_resource is layers[0]
    inner = layers[-1].allocate(50)
    assert inner.memory_resource is layers[-1]
    inner.close()
    assert [size for _, size in device.released] == [50]
    buffer.close()
    buffer.close()
    assert [size for _, size in device.released] == [50, 100]


@pytest.mark.parametrize("stack", STACKS, ids="-".join)
def test_a_double_free_warns_and_is_not_counted(stack: tuple[str, ...], device: Any) -> None:
    layers = build(stack, device)
    buffer = layers[0].allocate(100)
    keep = layers[0].allocate(7)
    pointer = int(buffer.handle)
    buffer.close()
    for size in (100, 99):
        with pytest.warns(MemoryDeallocationWarning, match="already freed"):
            layers[0].deallocate(pointer, size)
    with pytest.warns(MemoryDeallocationWarning, match="7 bytes are allocated there"):
        layers[0].deallocate(int(keep.handle), 8)
    assert [size for _, size in device.released] == [100]
    for layer in layers:
        if hasattr(layer, "live"):
            assert layer.live == 7
        if isinstance(layer, TracingMemoryResource):
            assert layer.frees == 1
        elif isinstance(layer, StatisticsMemoryResource):
            assert layer.statistics().total.frees == 1


@pytest.mark.parametrize("stack", STACKS, ids="-".join)
def test_a_free_that_fails_is_not_counted(stack: tuple[str, ...], device: Any) -> None:
    layers = build(stack, device)
    pointer = layers[0].acquire(100, None)
    device.fail_free = StickyDeviceError(AllocationRequest(size=100, why=Why.EARLIER_ERROR))
    with pytest.raises(StickyDeviceError):
        layers[0].release(pointer, 100, None)
    for layer in layers:
        if hasattr(layer, "live"):
            assert layer.live == 100
    layers[0].release(pointer, 100, None)
    for layer in layers:
        if hasattr(layer, "live"):
            assert layer.live == 0


@pytest.mark.parametrize("stack", [("tracing", "statistics"), ("statistics", "tracing")], ids="-".join)
def test_threads_and_destructors_lose_nothing(stack: tuple[str, ...]) -> None:
    host = HostMemoryResource(GIB)
    layers = build(stack, host)
    barrier = threading.Barrier(4)

    class Cycle:
        def __init__(self, buffer: Buffer) -> None:
            self.buffer, self.me = buffer, self

    def work(number: int) -> None:
        barrier.wait()
        with memory_scope(f"kv/{number}"):
            for size in range(200):
                buffer = layers[0].allocate(size)
                if size % 3:
                    buffer.close()
                else:
                    Cycle(buffer)  # freed by the garbage collector, on whatever thread it runs

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    tracing = next(layer for layer in layers if isinstance(layer, TracingMemoryResource))
    counts = next(layer for layer in layers if isinstance(layer, StatisticsMemoryResource)).statistics()
    assert (tracing.allocations, tracing.frees, tracing.live) == (800, 800, 0)
    assert (counts.total.allocations, counts.total.frees, counts.total.live_bytes) == (800, 800, 0)
    assert host.live == 0
    events = recorded(tracing.recorder)
    assert len(events) == 1600
    assert {event.state for event in events} == {EventState.OK}
    assert sorted(event.sequence for event in events if event.kind is EventKind.ALLOC) == list(range(1, 801))


def test_a_destructor_may_run_in_the_middle_of_a_request(device: Any, recorder: FlightRecorder) -> None:
    """The garbage collector frees while this thread is inside the adaptors: no deadlock, nothing lost."""
    statistics = StatisticsMemoryResource(device)
    tracing = TracingMemoryResource(statistics, recorder)

    class Cycle:
        def __init__(self) -> None:
            self.buffer, self.me = tracing.allocate(10), self

    for _ in range(5):
        Cycle()
    device.before_acquire = lambda size: gc.collect() and None
    kept = tracing.allocate(20)
    assert device.live == 20
    assert (tracing.allocations, tracing.frees, tracing.live) == (6, 5, 20)
    events = recorded(recorder)
    assert [event.kind for event in events] == [EventKind.ALLOC] * 6 + [EventKind.FREE] * 5
    assert {event.state for event in events} == {EventState.OK}
    kept.close()


def test_views_through_a_stack_are_writable(recorder: FlightRecorder) -> None:
    host = HostMemoryResource(MIB)
    buffer = StatisticsMemoryResource(TracingMemoryResource(host, recorder)).allocate(64)
    view = np.from_dlpack(buffer)
    view[:] = 3
    del buffer
    assert (view == 3).all()
    del view
    gc.collect()
    assert host.live == 0


# -- foreign resources -------------------------------------------------------------------------------------


class PlainResource(MemoryResource):  # type: ignore[misc]
    """What another library brings: cuda.core's interface and nothing of ours."""

    is_device_accessible = False
    is_host_accessible = True
    device_id = -1

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self.freed: list[int] = []

    def allocate(self, size: int, *, stream: Any) -> Buffer:
        if size > 1000:
            raise MemoryError("no more")
        if size == 13:
            raise RuntimeError("something\nelse")
        array = np.empty(max(size, 1), np.uint8)
        self.arrays[array.ctypes.data] = array
        return Buffer.from_handle(array.ctypes.data, size, mr=self)

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        self.freed.append(size)
        del self.arrays[int(ptr)]


@pytest.mark.parametrize("stack", STACKS[4:10], ids="-".join)
def test_any_memory_resource_can_be_upstream(stack: tuple[str, ...], device: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(
        WRAPS,
        "tracing",
        lambda upstream: TracingMemoryResource(
            upstream, FlightRecorder.in_memory(TraceHeader(capacity=64)), gauge=device
        ),
    )
    plain = PlainResource()
    layers = build(stack, plain)
    first, second = layers[0].allocate(100), layers[0].allocate(200)
    assert np.from_dlpack(first).shape == (100,)
    first.close()
    assert plain.freed == [100]
    with pytest.raises(OutOfMemoryError, match="no more"):
        layers[0].allocate(1001)
    del second
    gc.collect()
    assert plain.freed == [100, 200]
    assert not plain.arrays
    with pytest.raises(UnknownPointerError):
        layers[0].release(1, 1, None)


def test_an_unclassified_failure_is_recorded_as_one(device: Any, recorder: FlightRecorder) -> None:
    output = io.StringIO()
    tracing = TracingMemoryResource(PlainResource(), recorder, gauge=device, lines=LineWriter(output))
    with pytest.raises(RuntimeError):
        tracing.allocate(13)
    (event,) = recorded(recorder)
    assert (event.state, event.why, event.text) == (EventState.FAILED, None, "RuntimeError: something else")
    assert "err=RuntimeError: something else why=unclassified" in output.getvalue()
    assert len(output.getvalue().splitlines()) == 1


def test_tracing_needs_somebody_who_knows_the_free_bytes(recorder: FlightRecorder) -> None:
    with pytest.raises(TypeError, match="PlainResource cannot tell its free bytes"):
        TracingMemoryResource(PlainResource(), recorder)


def test_the_gauge_is_found_under_any_stack(device: Any) -> None:
    assert gauge_of(LimitingMemoryResource(StatisticsMemoryResource(device), 5)) is device
    assert cap_of(device) is None
    assert cap_of(StatisticsMemoryResource(LimitingMemoryResource(LimitingMemoryResource(device, 5), 7))) == 5
    assert gauge_of(StatisticsMemoryResource(PlainResource())) is None


# -- limiting ----------------------------------------------------------------------------------------------


def test_a_limit_is_a_cap_and_says_so(device: Any) -> None:
    limiting = LimitingMemoryResource(device, 100)
    kept = limiting.allocate(60)
    assert limiting.available == 40
    with memory_scope("kv"), pytest.raises(OutOfMemoryError) as caught:
        limiting.allocate(41)
    request = caught.value.request
    assert (request.why, request.live, request.tag, request.api) == (Why.CAP, 60, "kv", "malloc")
    assert request.error == "out of memory: over the limit of 100 B"
    assert device.acquired == [60]
    exact = limiting.allocate(40)
    kept.close()
    exact.close()
    assert limiting.live == 0


def test_a_failure_below_gives_the_reservation_back(device: Any) -> None:
    limiting = LimitingMemoryResource(device, 100)
    device.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        limiting.allocate(60)
    assert limiting.live == 0
    limiting.allocate(100).close()


def test_a_negative_limit_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="limit of -1"):
        LimitingMemoryResource(device, -1)


# -- injected faults ---------------------------------------------------------------------------------------


def outcomes(resource: MemoryResource, requests: list[tuple[str, int]]) -> str:
    """``.`` for what succeeded, ``x`` for what failed by order."""
    marks = ""
    failed: list[AllocationRequest] = []
    for tag, size in requests:
        with memory_scope(tag):
            try:
                resource.allocate(size).close()
                marks += "."
            except AllocationError as error:
                failed.append(error.request)
                marks += "x"
    assert {request.why for request in failed} <= {Why.INJECTED}
    assert [(request.tag, request.size) for request in failed] == [
        request for request, mark in zip(requests, marks, strict=True) if mark == "x"
    ]
    return marks


REQUESTS = [("kv", 1), ("kv/a", 50), ("weights/kv", 50), ("kvx/a", 9)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(), "xxxx"),
        (Fault(nth=2), ".x.."),
        (Fault(larger_than=9), ".xx."),
        (Fault(tag="kv"), "xx.."),
        (Fault(tag="kv", nth=2), ".x.."),
        (Fault(tag="kv", larger_than=9), ".x.."),
        (Fault(times=1), "x..."),
        (Fault(larger_than=9, nth=2), "..x."),
    ],
)
def test_which_requests_fail(fault: Fault, expected: str, device: Any) -> None:
    requests = [(tag.replace("kvx", "other"), size) for tag, size in REQUESTS]
    faulty = FaultInjectingMemoryResource(device, [fault])
    assert outcomes(faulty, requests) == expected
    assert faulty.injected == expected.count("x")
    assert len(device.acquired) == expected.count(".")
    assert device.live == 0


def test_faults_can_be_armed_and_disarmed(device: Any) -> None:
    faulty = FaultInjectingMemoryResource(device)
    assert outcomes(faulty, [("kv", 1)]) == "."
    faulty.arm(Fault(nth=1, error=StickyDeviceError))
    with pytest.raises(StickyDeviceError):
        faulty.allocate(1)
    faulty.arm(Fault())
    faulty.disarm()
    assert outcomes(faulty, [("kv", 1)]) == "."


# -- statistics --------------------------------------------------------------------------------------------


def test_a_snapshot_stays_what_it_was(device: Any) -> None:
    resource = StatisticsMemoryResource(device)
    before = resource.statistics()
    with memory_scope("io"):
        kept = resource.allocate(5)
    assert before.total.allocations == 0
    assert before.by_tag == {}
    facts = resource.statistics().to_dict()
    assert facts["total"]["live_bytes"] == facts["by_tag"]["io"]["live_bytes"] == 5
    kept.close()


# -- tracing: what is recorded -----------------------------------------------------------------------------


def test_the_intent_is_on_record_before_the_driver_is_called(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    seen: list[list[TraceEvent]] = []
    device.before_acquire = lambda size: seen.append(recorded(recorder))
    with memory_scope("weights/a"), request_scope(["r1", "r2"]):
        buffer = tracing.allocate(123)
    ((intent,),) = seen
    assert (intent.kind, intent.state, intent.size) == (EventKind.ALLOC, EventState.INTENT, 123)
    assert (intent.tag, intent.requests, intent.sequence) == ("weights/a", ("r1", "r2"), 1)
    assert intent.site.startswith("tests/memory/test_adaptors.py:")
    (done,) = recorded(recorder)
    assert done.state is EventState.OK
    assert done.pointer == int(buffer.handle)
    assert done.live == 123
    assert done.finished_ns >= done.started_ns > 0
    assert done.thread == threading.get_ident()
    assert done.site == intent.site
    buffer.close()


def test_a_free_is_recorded_after_it_happened_with_the_blocks_names(
    device: Any, recorder: FlightRecorder
) -> None:
    tracing = TracingMemoryResource(device, recorder)
    with memory_scope("kv"):
        buffer = tracing.allocate(20 * MIB)
    pointer = int(buffer.handle)
    buffer.close()
    allocated, freed = recorded(recorder)
    assert (freed.kind, freed.state) == (EventKind.FREE, EventState.OK)
    assert (freed.tag, freed.site, freed.sequence) == ("kv", allocated.site, 1)
    assert (freed.pointer, freed.size, freed.live) == (pointer, 20 * MIB, 0)
    assert (freed.free, freed.free_is_read) == (device.total, True)


def test_a_failure_completes_the_error_and_the_record(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(LimitingMemoryResource(device, 10), recorder)
    tracing.allocate(1).close()
    with memory_scope("workspace"), request_scope(["r"]), pytest.raises(OutOfMemoryError) as caught:
        tracing.allocate(11)
    assert caught.value.sequence == 2
    assert caught.value.free == device.total
    assert caught.value.request.requests == ("r",)
    failed = recorded(recorder)[-1]
    assert (failed.state, failed.sequence, failed.why) == (EventState.FAILED, 2, Why.CAP)
    assert failed.text == "out of memory: over the limit of 10 B"
    assert (failed.site, failed.tag) == (caught.value.site, "workspace")
    assert (failed.free, failed.free_is_read) == (device.total, True)


def test_a_free_that_fails_keeps_the_block(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    buffer = tracing.allocate(10)
    device.fail_free = StickyDeviceError(
        AllocationRequest(size=10, why=Why.EARLIER_ERROR, error="illegal address", error_code=700)
    )
    pointer = int(buffer.handle)
    with pytest.warns(MemoryDeallocationWarning, match="illegal address"):
        tracing.deallocate(pointer, 10)
    failed = recorded(recorder)[-1]
    assert (failed.kind, failed.state, failed.error_code) == (EventKind.FREE, EventState.FAILED, 700)
    assert (failed.pointer, failed.live) == (pointer, 10)
    buffer.close()
    assert (tracing.live, tracing.frees) == (0, 1)


def test_pool_and_retries_are_on_record(make_device: Any, recorder: FlightRecorder) -> None:
    device = make_device()
    device.api, device.pool, device.retries = "async", (4 * GIB, 6 * GIB), 1
    output = io.StringIO()
    tracing = TracingMemoryResource(device, recorder, lines=LineWriter(output))
    kept = tracing.allocate(16 * MIB)
    (event,) = recorded(recorder)
    assert (event.api, event.pool_used, event.pool_reserved, event.retries) == ("async", 4 * GIB, 6 * GIB, 1)
    assert "api=async pool_used=4.00 GiB pool_reserved=6.00 GiB retries=1" in output.getvalue()
    kept.close()


def test_a_record_that_was_lapped_while_it_ran_is_written_again(device: Any) -> None:
    recorder = FlightRecorder.in_memory(TraceHeader(capacity=4))
    tracing = TracingMemoryResource(device, recorder)

    def crowd(size: int) -> None:
        if size == 777:
            for number in range(9):
                tracing.note(f"note {number}")

    device.before_acquire = crowd
    with memory_scope("kv"):
        buffer = tracing.allocate(777)
    last = recorded(recorder)[-1]
    assert (last.size, last.state, last.tag, last.pointer) == (777, EventState.OK, "kv", int(buffer.handle))
    buffer.close()


def test_an_unknown_pointer_leaves_a_note(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    with pytest.raises(UnknownPointerError):
        tracing.release(0xABC, 5, None)
    (note,) = recorded(recorder)
    assert (note.kind, note.text) == (
        EventKind.NOTE, "cannot free 5 bytes at 0xabc: not allocated here, or already freed",
    )  # fmt: skip


def test_frees_after_the_recorder_closed_still_free(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    buffer = tracing.allocate(5)
    recorder.close()
    buffer.close()
    tracing.allocate(6).close()
    assert device.live == tracing.live == 0


# -- tracing: honest free ----------------------------------------------------------------------------------


def test_between_readings_free_is_an_estimate_and_says_so(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    held = [tracing.allocate(MIB) for _ in range(10)]  # the first has nothing to estimate from
    assert device.readings == 1
    device.neighbours = GIB
    held.append(tracing.allocate(MIB))
    held.append(tracing.allocate(16 * MIB))
    assert device.readings == 2
    held.append(tracing.allocate(MIB))
    events = recorded(recorder)
    assert [event.free_is_read for event in events] == [True] + [False] * 10 + [True, False]
    assert [event.free for event in events] == [
        *(device.total - count * MIB for count in range(1, 12)),
        device.total - 27 * MIB - GIB,
        device.total - 28 * MIB - GIB,
    ]
    held.clear()


def test_below_the_low_mark_every_request_reads(make_device: Any, recorder: FlightRecorder) -> None:
    device = make_device(GIB)
    tracing = TracingMemoryResource(device, recorder)
    held = [tracing.allocate(1) for _ in range(3)]
    assert device.readings == 3
    held.clear()
    assert device.readings == 6
    assert all(event.free_is_read for event in recorded(recorder))


def test_an_exact_gauge_is_always_read(make_device: Any, recorder: FlightRecorder) -> None:
    device = make_device(exact=True)
    tracing = TracingMemoryResource(device, recorder)
    device.neighbours = 5
    tracing.allocate(1).close()
    assert [(event.free, event.free_is_read) for event in recorded(recorder)] == [
        (device.total - 6, True),
        (device.total - 5, True),
    ]


def test_a_reading_that_fails_changes_no_outcome(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    device.fail_reading = RuntimeError("no figure")
    tracing.allocate(GIB).close()
    device.fail_next = OutOfMemoryError(AllocationRequest(size=1))
    with pytest.raises(OutOfMemoryError) as caught:
        tracing.allocate(1)
    assert caught.value.free is None
    events = recorded(recorder)
    assert [event.state for event in events] == [EventState.OK, EventState.OK, EventState.FAILED]
    assert {event.free for event in events} == {None}


def test_after_a_sticky_error_the_driver_is_left_alone(device: Any, recorder: FlightRecorder) -> None:
    tracing = TracingMemoryResource(device, recorder)
    kept = tracing.allocate(GIB)
    readings = device.readings
    device.fail_next = StickyDeviceError(
        AllocationRequest(size=5, why=Why.EARLIER_ERROR, error="illegal address", error_code=700)
    )
    with pytest.raises(StickyDeviceError) as caught:
        tracing.allocate(GIB)
    kept.close()
    assert device.readings == readings
    assert caught.value.free is None
    failed, freed = recorded(recorder)[-2:]
    assert (failed.why, failed.error_code, failed.free_is_read) == (Why.EARLIER_ERROR, 700, False)
    assert (freed.free, freed.free_is_read) == (device.total, False)


# -- tracing: what is printed ------------------------------------------------------------------------------


def test_print_rules(device: Any, recorder: FlightRecorder) -> None:
    output = io.StringIO()
    tracing = TracingMemoryResource(device, recorder, lines=LineWriter(output))
    with memory_scope("weights/a"):
        small = tracing.allocate(16 * MIB - 1)
        large = tracing.allocate(16 * MIB)
        small.close()
        large.close()
        with pytest.raises(OutOfMemoryError):
            tracing.allocate(1 << 50)
        kept = tracing.allocate(22 * GIB + 1)
        tiny = tracing.allocate(1)
        tiny.close()
    kept.close()
    lines = output.getvalue().splitlines()
    starts = [line.split(" size=")[0] for line in lines]
    assert starts == [
        "[cuda-alloc] #2",
        "[cuda-free] ",
        "[cuda-alloc] FAILED #3",
        "[cuda-alloc] #4",
        "[cuda-alloc] #5",  # less than 2 GiB free: everything is printed
        "[cuda-free] ",
        "[cuda-free] ",
    ]
    assert all("tag=weights/a" in line for line in lines)
    assert len(recorded(recorder)) == 9  # and everything is recorded


def test_thresholds_are_the_callers(device: Any, recorder: FlightRecorder) -> None:
    output = io.StringIO()
    tracing = TracingMemoryResource(device, recorder, lines=LineWriter(output), min_bytes=0, low_free_bytes=0)
    first = tracing.allocate(1)
    second = tracing.allocate(2)
    lines = output.getvalue().splitlines()
    assert len(lines) == 2
    assert "free_is=estimate" not in lines[0]
    assert lines[1].endswith("free_is=estimate")
    assert device.readings == 1
    first.close()
    second.close()


def test_the_line_of_a_failure_names_everything(device: Any, recorder: FlightRecorder) -> None:
    output = io.StringIO()
    tracing = TracingMemoryResource(device, recorder, lines=LineWriter(output))
    with memory_scope("kv"), request_scope(["cmpl-1"]), pytest.raises(OutOfMemoryError) as caught:
        tracing.allocate(25 * GIB)
    (line,) = output.getvalue().splitlines()
    assert line == (
        "[cuda-alloc] FAILED #1 size=25600.0 MiB live=0.00 GiB free=24.00 GiB err=out of memory why=full"
        f" tag=kv site={caught.value.site} code=2 requests=cmpl-1"
    )
