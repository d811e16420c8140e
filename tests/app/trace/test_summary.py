"""A summary says what a plain count over the events says, and names the failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.trace.summary import Summary, layer_pattern, summarize
from engine.memory.errors import Why
from engine.memory.record import EventKind, EventState, TraceEvent
from tests.app.trace.making import MIB, TraceMaker, table_of, table_of_events


def summary_of(path: Path) -> Summary:
    return summarize(table_of(path))


def test_load_that_fails(loaded: SimpleNamespace) -> None:
    found = summary_of(loaded.path)
    assert found.failure is not None
    assert (found.failure.sequence, found.failure.size, found.failure.tag) == (6, 64 * MIB, "workspace")
    assert found.failure.why is Why.FULL
    assert (found.failures, found.records, found.missing) == (1, 8, 0)
    assert (found.peak, found.live, found.before) == (loaded.peak, loaded.live, 0)
    assert found.peak_sequence == 5
    assert [(block.sequence, block.size // MIB) for block in found.at_peak] == [
        (1, 100),
        (4, 40),
        (2, 30),
        (5, 20),
    ]
    assert found.at_peak_unknown == 0
    by_tag = {group.name: group for group in found.by_tag}
    weights, scratch = by_tag["weights/model.layers.*.mlp"], by_tag["repack/model.layers.*.mlp"]
    assert (weights.allocations, weights.allocated, weights.live, weights.at_peak) == (
        2,
        70 * MIB,
        70 * MIB,
        70 * MIB,
    )
    assert weights.median_lifetime is None
    assert (scratch.frees, scratch.largest, scratch.live, scratch.at_peak) == (2, 50 * MIB, 0, 20 * MIB)
    assert scratch.longest_lifetime is not None
    assert scratch.median_lifetime is not None
    assert 0 < scratch.median_lifetime <= scratch.longest_lifetime <= found.duration
    assert by_tag["workspace"].failures == 1
    assert [group.allocations for group in found.by_site] == [3, 2, 0]
    assert found.by_site[0].name.startswith("tests/app/trace/making.py:")


def test_overwritten_beginning_is_said(make_trace: Callable[..., TraceMaker]) -> None:
    maker = make_trace(records=64)
    maker.allocate("old", 7 * MIB, "kv")
    maker.allocate("kept", 5 * MIB, "weights/a")
    for number in range(40):
        maker.allocate(str(number), MIB, "io")
        maker.free(str(number))
    maker.free("old")
    found = summary_of(maker.close())
    assert found.records == 64
    assert found.missing == 19
    assert (found.before, found.peak, found.live, found.peak_sequence) == (13 * MIB, 13 * MIB, 5 * MIB, 0)
    # What is older than the trace and freed in it has a name, the rest has none.
    assert found.at_peak_unknown == 5 * MIB
    assert {block.tag for block in found.at_peak} == {"io", "kv"}


def test_request_without_an_outcome_is_pending(make_trace: Callable[..., TraceMaker]) -> None:
    maker = make_trace()
    maker.allocate("a", MIB)
    recorder = maker.house.recorder
    assert recorder is not None
    recorder.begin(EventKind.ALLOC, 2, 3 * MIB, 0, 0, b"malloc", "kv", "cache.py:1", ())
    found = summary_of(maker.close())
    assert [(event.sequence, event.size, event.state) for event in found.pending] == [
        (2, 3 * MIB, EventState.INTENT)
    ]
    assert found.peak == MIB


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        ("weights/model.layers.12.mlp.down_proj", "weights/model.layers.*.mlp.down_proj"),
        ("kv", "kv"),
        ("weights/experts.3.w2", "weights/experts.*.w2"),
        ("io/7", "io/*"),
        ("weights/fp8.layer", "weights/fp8.layer"),
    ],
)
def test_layers_count_together(tag: str, pattern: str) -> None:
    assert layer_pattern(tag) == pattern


@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(["kv", "io", "weights/a.0"]), st.booleans()))
)
def test_agrees_with_a_plain_count(requests: list[tuple[int, str, bool]]) -> None:
    """Each request is an allocation, or with a set flag the free of the oldest block that is live."""
    events: list[TraceEvent] = []
    live: list[TraceEvent] = []
    peak = peak_sequence = now = 0
    at_peak: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    for size, tag, is_free in requests:
        if is_free and live:
            block = live.pop(0)
            now -= block.size
            event = TraceEvent(EventKind.FREE, EventState.OK, block.size, tag=block.tag, live=now)
            event.sequence = block.sequence
        else:
            now += size
            event = TraceEvent(EventKind.ALLOC, EventState.OK, size, tag=tag, live=now)
            event.sequence = 1 + sum(other.kind is EventKind.ALLOC for other in events)
            allocated[tag] += size
            live.append(event)
            if now > peak:
                peak, peak_sequence = now, event.sequence
                at_peak = Counter()
                for block in live:
                    at_peak[block.tag] += block.size
        events.append(event)
    found = summarize(table_of_events(events), name_of=str)
    assert (found.peak, found.peak_sequence, found.live) == (peak, peak_sequence, now)
    assert {g.name: g.at_peak for g in found.by_tag if g.at_peak} == {k: v for k, v in at_peak.items() if v}
    assert {g.name: g.allocated for g in found.by_tag if g.allocated} == {
        k: v for k, v in allocated.items() if v
    }
    assert found.at_peak_unknown == 0
    assert sum(group.live for group in found.by_site) == now
