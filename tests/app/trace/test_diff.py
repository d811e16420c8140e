"""Traces are compared by what asked and in which order: addresses and numbers play no part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from app.cli.trace.diff import without_line
from app.trace.diff import Diff, compare
from engine.memory.record import EventKind, EventState, TraceEvent
from tests.app.trace.making import MIB, TAGS, TraceMaker, table_of, table_of_events, traces


def diff_of(before: list[TraceEvent], after: list[TraceEvent]) -> Diff:
    return compare(table_of_events(before), table_of_events(after), tag_name=str)


def run(maker: TraceMaker, *, layers: int, kv: int, leak: bool) -> TraceMaker:
    for layer in range(layers):
        maker.elsewhere(f"s{layer}", 4 * MIB, f"repack/model.layers.{layer}.mlp")
        maker.allocate(f"w{layer}", 10 * MIB, f"weights/model.layers.{layer}.mlp")
        if not (leak and layer == 1):
            maker.free(f"s{layer}")
    maker.allocate("k", kv, "kv")
    maker.allocate("v", kv, "kv")
    return maker


def test_what_appeared_vanished_and_grew(make_trace: Callable[..., TraceMaker]) -> None:
    before = run(make_trace("before"), layers=3, kv=8 * MIB, leak=False)
    before.allocate("old", 7 * MIB, "io/old")
    after = make_trace("after")
    after.allocate("first", 1 * MIB, "graph")  # every number and address after it differs
    run(after, layers=4, kv=9 * MIB, leak=True)
    found = compare(table_of(before.close()), table_of(after.close()))
    groups = {group.tag: group for group in found.groups}
    weights, scratch, kv = (
        groups["weights/model.layers.*.mlp"],
        groups["repack/model.layers.*.mlp"],
        groups["kv"],
    )
    assert (weights.before, weights.after, weights.appeared, weights.difference) == (3, 4, 1, 10 * MIB)
    assert (scratch.before, scratch.after, scratch.appeared, scratch.kept) == (3, 4, 1, 1)
    assert (kv.before, kv.after, kv.grew, kv.difference) == (2, 2, 2, 2 * MIB)
    assert (groups["io/old"].vanished, groups["io/old"].difference) == (1, -7 * MIB)
    assert (groups["graph"].appeared, groups["graph"].before) == (1, 0)
    assert [abs(group.difference) for group in found.groups] == [size * MIB for size in (10, 7, 4, 2, 1)]
    assert found.same == 5
    kept = next(change for change in found.changes if change.kept)
    assert (kept.tag, kept.ordinal, kept.before, kept.after) == (
        "repack/model.layers.1.mlp",
        1,
        4 * MIB,
        4 * MIB,
    )
    grown = [change for change in found.changes if change.tag == "kv"]
    assert [(change.ordinal, change.before_sequence, change.after_sequence) for change in grown] == [
        (1, 7, 10),
        (2, 8, 11),
    ]
    assert (found.after.peak - found.before.peak, found.after.requests) == (10 * MIB, 11)
    assert found.before.failure is None


def test_failures_are_told_of_both(loaded: SimpleNamespace, make_trace: Callable[..., TraceMaker]) -> None:
    other = make_trace("other")
    other.allocate("kv", 100 * MIB, "kv")
    found = compare(table_of(loaded.path), table_of(other.close()))
    assert found.before.failure is not None
    assert (found.before.failure.sequence, found.before.failures, found.after.failures) == (6, 1, 0)
    facts = found.to_dict()
    assert facts["before"]["failure"]["why"] == "full"
    assert facts["after"]["failure"] is None
    assert sum(group["difference"] for group in facts["groups"]) == -140 * MIB


@given(traces())
def test_a_trace_is_the_same_as_itself_wherever_its_blocks_lie(events: list[TraceEvent]) -> None:
    moved = [
        replace(event, pointer=event.pointer + 512, sequence=event.sequence and event.sequence + 100)
        for event in events
    ]
    found = diff_of(events, moved)
    assert (found.groups, found.changes) == ([], [])
    assert found.same == sum(e.kind is EventKind.ALLOC and e.state is EventState.OK for e in events)


@given(before=traces(), after=traces())
def test_agrees_with_a_plain_comparison(before: list[TraceEvent], after: list[TraceEvent]) -> None:
    def sizes(events: list[TraceEvent]) -> dict[tuple[str, str], list[tuple[int, bool]]]:
        freed = {event.sequence for event in events if event.kind is EventKind.FREE}
        found: dict[tuple[str, str], list[tuple[int, bool]]] = {}
        for event in events:
            if event.kind is EventKind.ALLOC and event.state is EventState.OK:
                found.setdefault((event.tag, event.site), []).append((event.size, event.sequence in freed))
        return found

    one, other = sizes(before), sizes(after)
    expected = {}
    for key in one.keys() | other.keys():
        ours, theirs = one.get(key, []), other.get(key, [])
        for place in range(max(len(ours), len(theirs))):
            pair = (
                ours[place] if place < len(ours) else None,
                theirs[place] if place < len(theirs) else None,
            )
            if pair[0] != pair[1]:
                expected[*key, place + 1] = pair
    found = diff_of(before, after)
    assert {
        (change.tag, change.site, change.ordinal): (change.before, change.after) for change in found.changes
    } == {key: (pair[0] and pair[0][0], pair[1] and pair[1][0]) for key, pair in expected.items()}
    back = diff_of(after, before)
    assert [-group.difference for group in back.groups] == [
        next(g.difference for g in found.groups if (g.tag, g.site) == (group.tag, group.site))
        for group in back.groups
    ]
    assert sum(group.difference for group in found.groups) == found.after.allocated - found.before.allocated


@given(st.integers(1, 500), st.integers(1, 500))
def test_lines_that_moved(one: int, other: int) -> None:
    before = [TraceEvent(EventKind.ALLOC, EventState.OK, 5, sequence=1, tag=TAGS[0], site=f"a.py:{one}")]
    after = [replace(before[0], site=f"a.py:{other}")]
    tables = table_of_events(before), table_of_events(after)
    assert bool(compare(*tables).changes) == (one != other)
    assert compare(*tables, site_name=without_line).changes == []
    assert without_line("a.py") == "a.py"
