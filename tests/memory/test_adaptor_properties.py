"""Any interleaving of requests, frees, failures and nonsense, against a model that fits on a page."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.core import Buffer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.memory.adaptors import (
    Fault,
    FaultInjectingMemoryResource,
    LimitingMemoryResource,
    StatisticsMemoryResource,
    TracingMemoryResource,
)
from engine.memory.base import MemoryDeallocationWarning
from engine.memory.errors import AllocationError, Why
from engine.memory.record import EventKind, EventState, TraceHeader
from engine.memory.recorder import FlightRecorder
from engine.memory.resources import PlanningMemoryResource
from engine.memory.scope import memory_scope

CAPACITY = 10_000
LIMIT = 6_000
STEP = 64
TAGS = st.sampled_from(["weights/a", "weights/b", "kv", "workspace", "other"])


class Model:
    """What must be true, kept by hand."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str, int]] = {}
        self.allocations = self.frees = self.peak = 0
        self.failures: dict[str, int] = {}

    @property
    def live(self) -> int:
        return sum(size for _, size in self.blocks.values())

    @property
    def taken(self) -> int:
        return sum(-(-size // STEP) * STEP for _, size in self.blocks.values())

    def by_tag(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for tag, size in self.blocks.values():
            totals[tag] = totals.get(tag, 0) + size
        return {tag: size for tag, size in totals.items() if size}


class Adaptors(RuleBasedStateMachine):
    """Two stacks in opposite orders take the same steps; both must agree with the model after each."""

    buffers = Bundle("buffers")

    @initialize()
    def build(self) -> None:
        self.model = Model()
        self.bottoms = [PlanningMemoryResource(CAPACITY, STEP) for _ in range(2)]
        self.faults: list[FaultInjectingMemoryResource] = []
        self.tracings: list[TracingMemoryResource] = []
        self.statistics: list[StatisticsMemoryResource] = []
        self.limits: list[LimitingMemoryResource] = []
        self.tops: list[Any] = []
        for number, bottom in enumerate(self.bottoms):
            fault = FaultInjectingMemoryResource(bottom)
            limit = LimitingMemoryResource(fault, LIMIT)
            recorder = FlightRecorder.in_memory(TraceHeader(capacity=512))
            top: Any
            if number:
                inner = StatisticsMemoryResource(limit)
                top = TracingMemoryResource(inner, recorder)
                self.statistics.append(inner)
                self.tracings.append(top)
            else:
                middle = TracingMemoryResource(limit, recorder)
                top = StatisticsMemoryResource(middle)
                self.statistics.append(top)
                self.tracings.append(middle)
            self.faults.append(fault)
            self.limits.append(limit)
            self.tops.append(top)
        self.last_peak = 0
        self.serial = 0
        self.held: dict[int, tuple[Buffer, ...]] = {}

    def expected_failure(self, size: int) -> Why | None:
        if self.model.live + size > LIMIT:
            return Why.CAP
        if self.model.taken + -(-size // STEP) * STEP > CAPACITY:
            return Why.FULL
        return None

    @rule(target=buffers, size=st.integers(0, 3000), tag=TAGS, fail=st.booleans())
    def allocate(self, size: int, tag: str, fail: bool) -> Any:
        why = self.expected_failure(size)
        if why is not Why.CAP and fail:  # the limit stands above the fault
            why = Why.INJECTED
            for fault in self.faults:
                fault.arm(Fault(times=1))
        pair: list[Buffer] = []
        with memory_scope(tag):
            for top in self.tops:
                if why is None:
                    pair.append(top.allocate(size))
                    continue
                with pytest.raises(AllocationError) as caught:
                    top.allocate(size)
                assert (caught.value.why, caught.value.tag, caught.value.size) == (why, tag, size)
        for fault in self.faults:
            fault.disarm()
        model = self.model
        if why is not None:
            model.failures[why.value] = model.failures.get(why.value, 0) + 1
            return multiple()
        self.serial += 1
        model.blocks[self.serial] = (tag, size)
        model.allocations += 1
        model.peak = max(model.peak, model.live)
        self.held[self.serial] = tuple(pair)
        return self.serial, tuple(pair)

    @rule(held=consumes(buffers), by_drop=st.booleans())
    def free(self, held: tuple[int, tuple[Buffer, Buffer]], by_drop: bool) -> None:
        serial, pair = held
        del self.model.blocks[serial], self.held[serial]
        self.model.frees += 1
        for buffer in pair:
            buffer.close()
            if not by_drop:
                buffer.close()  # a second close is no second free

    @rule(held=buffers, wrong=st.integers(1, 5))
    def free_nonsense(self, held: tuple[int, tuple[Buffer, Buffer]], wrong: int) -> None:
        for top, buffer in zip(self.tops, held[1], strict=True):
            with pytest.warns(MemoryDeallocationWarning):
                top.deallocate(int(buffer.handle), buffer.size + wrong)
            with pytest.warns(MemoryDeallocationWarning):
                top.deallocate(wrong, buffer.size)

    @invariant()
    def everything_agrees(self) -> None:
        model = self.model
        for bottom, limit, tracing, statistics in zip(
            self.bottoms, self.limits, self.tracings, self.statistics, strict=True
        ):
            assert bottom.live == limit.live == tracing.live == statistics.live == model.live
            assert bottom.read_free() == CAPACITY - model.taken
            counts = statistics.statistics()
            failures = sum(model.failures.values())
            expected = (model.allocations, model.frees, failures)
            assert (tracing.allocations, tracing.frees, tracing.failures) == expected
            assert (counts.total.allocations, counts.total.frees, counts.total.failures) == expected
            assert tracing.peak == counts.total.peak_bytes == model.peak
            assert tracing.live_by_tag() == statistics.live_by_tag() == model.by_tag()
            assert sum(tracing.live_by_tag().values()) == model.live
            assert counts.failures_by_why == model.failures
            tags = counts.by_tag.values()
            for field in ("allocations", "frees", "failures", "allocated_bytes", "freed_bytes"):
                assert sum(getattr(tag, field) for tag in tags) == getattr(counts.total, field)
            assert all(0 <= tag.live_bytes <= tag.peak_bytes <= counts.total.peak_bytes for tag in tags)
        assert model.peak >= self.last_peak
        self.last_peak = model.peak

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for pair in self.held.values():
            for buffer in pair:
                buffer.close()
        for resource in (*self.bottoms, *self.limits, *self.tracings, *self.statistics):
            assert resource.live == 0
        traces = [
            [event for event in tracing.recorder.reader().read().events() if event.kind is not EventKind.NOTE]
            for tracing in self.tracings
        ]
        for events in traces:
            allocations = [event for event in events if event.kind is EventKind.ALLOC]
            # #N counts every request, also those that fail.
            assert [event.sequence for event in allocations] == list(range(1, len(allocations) + 1))
            assert sum(event.state is EventState.OK for event in allocations) == self.model.allocations
            live = 0
            for event in events:
                if event.state is EventState.OK:
                    live += event.size if event.kind is EventKind.ALLOC else -event.size
                assert event.live == live
        assert [(event.kind, event.state, event.size, event.tag) for event in traces[0]] == [
            (event.kind, event.state, event.size, event.tag) for event in traces[1]
        ]


Adaptors.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdaptors = Adaptors.TestCase
