"""Logs become traces: ours whole, another program's as far as its lines tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given

from app.trace.importers import import_trace
from app.trace.summary import Summary, summarize
from engine.memory.errors import TraceFileError, Why
from engine.memory.lines import format_line
from engine.memory.record import EventKind, EventState, TraceEvent
from tests.app.trace.making import MIB, events_of, table_of_events, traces

OTHER_PROGRAM = """\
INFO 2026-05-01 loading shard 1/4
[cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=23.10 GiB
14:02:11 worker-0 | [cuda-alloc] #13 size=2425.0 MiB live=2.40 GiB free=20.73 GiB tag=repack
[cuda-alloc] #15 size=32.0 MiB live=2.43 GiB free=20.70 GiB
[cuda-free]  size=2425.0 MiB live=0.06 GiB free=23.07 GiB tag=repack
[cuda-free]  size=32.0 MiB live=0.03 GiB free=23.10 GiB
[cuda-free]  size=7.0 MiB live=0.02 GiB free=23.11 GiB
[cuda-alloc] NOTE something was said
[host-alloc] #3 size=1.0 MiB live=0.00 GiB free=1.00 GiB
[cuda-alloc] FAILED #717 size=606.0 MiB live=0.02 GiB free=0.31 GiB err=out of memory why=full tag=kv
[cuda-alloc] #x size=no MiB
"""


def imported(path: Path, text: str) -> tuple[list[TraceEvent], Summary]:
    path.write_text(text)
    with import_trace(path) as (_, found):
        events = list(found)
    return events, summarize(table_of_events(events))


def test_another_programs_log(tmp_path: Path) -> None:
    events, found = imported(tmp_path / "log", OTHER_PROGRAM)
    told = [(e.kind.name, e.state.name, round(e.size / MIB), e.sequence, e.tag) for e in events[:-2]]
    assert told == [
        ("ALLOC", "OK", 32, 12, "other"),
        ("ALLOC", "OK", 2425, 13, "repack"),
        ("ALLOC", "OK", 32, 15, "other"),
        ("FREE", "OK", 2425, 13, "repack"),
        ("FREE", "OK", 32, 15, "other"),
        ("FREE", "OK", 7, 0, "other"),
        ("ALLOC", "FAILED", 606, 717, "kv"),
    ]
    assert [event.text for event in events[-2:]] == [
        "702 requests between the numbers of the log were not printed",
        "1 lines of other devices were left out",
    ]
    assert (found.peak, found.peak_sequence) == (2489 * MIB, 15)
    assert found.failure is not None
    assert (found.failure.why, found.failure.free) == (Why.FULL, round(0.31 * (1 << 30)))


def test_our_own_lines(loaded: SimpleNamespace, tmp_path: Path) -> None:
    recorded = events_of(loaded.path)
    events, found = imported(tmp_path / "log", "\n".join(format_line(event, "host") for event in recorded))

    def facts(event: TraceEvent) -> tuple[object, ...]:
        names = (event.kind, event.state, event.size, event.sequence, event.tag, event.site)
        return (*names, event.live, event.why, event.text)

    assert [facts(event) for event in events] == [facts(event) for event in recorded]
    assert (found.peak, found.live) == (loaded.peak, loaded.live)
    assert len({event.pointer for event in events if event.kind is EventKind.ALLOC and event.pointer}) == 5


@given(events=traces())
def test_frees_end_what_they_ended(
    events: list[TraceEvent], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for event in events:  # a line has tenths of a MiB
        event.size = round(event.size / MIB * 10) * MIB // 10
    said = [event for event in events if event.kind is not EventKind.NOTE]
    if not said:
        return
    text = "\n".join(format_line(event, "cuda") for event in said)
    found, _ = imported(tmp_path_factory.mktemp("log") / "log", text)
    assert [(e.kind, e.state, e.sequence, e.tag) for e in found] == [
        (e.kind, e.state, e.sequence, e.tag) for e in said
    ]
    live = 0
    for event in found:
        if event.state is EventState.OK:
            live += event.size if event.kind is EventKind.ALLOC else -event.size
        assert event.live == live


@pytest.mark.parametrize("data", [b"", b"nothing\n", b"\x00" * 5000, b"[cuda-alloc] " + b"9" * 200_000])
def test_what_is_no_log_is_told_in_a_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(TraceFileError) as caught, import_trace(path):
        pass
    assert str(caught.value).startswith(f"{path}: no line like `[cuda-alloc] #1 size=32.0 MiB")
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path: Path, make_trace: Callable[..., object]) -> None:
    with pytest.raises(TraceFileError, match="cannot be read: No such file"), import_trace(tmp_path / "no"):
        pass
    with pytest.raises(TraceFileError, match="cannot be read: Is a directory"), import_trace(tmp_path):
        pass
