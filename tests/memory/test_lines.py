from __future__ import annotations

import io
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.errors import Why
from engine.memory.lines import LineWriter, format_line, parse_line
from engine.memory.record import EventKind, EventState, TraceEvent

MIB = 1 << 20
GIB = 1 << 30

ALLOC = TraceEvent(
    EventKind.ALLOC,
    EventState.OK,
    32 * MIB,
    sequence=12,
    tag="weights/model.layers.0.mlp.down_proj",
    live=int(0.03 * GIB),
    free=int(23.1 * GIB),
    free_is_read=True,
    api="malloc",
)


# -- the format ----------------------------------------------------------------------------------------------


def test_an_allocation() -> None:
    assert format_line(ALLOC, "cuda") == (
        "[cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=23.10 GiB tag=weights/model.layers.0.mlp.down_proj"
    )
    assert format_line(ALLOC, "host").startswith("[host-alloc] #12 ")


def test_a_free() -> None:
    event = replace(
        ALLOC,
        kind=EventKind.FREE,
        size=2425 * MIB,
        live=int(6.74 * GIB) + 1,
        free=int(13.81 * GIB) + 1,
        tag="repack/model.layers.0.mlp.down_proj",
    )
    line = format_line(event, "cuda")
    assert line == (
        "[cuda-free]  size=2425.0 MiB live=6.74 GiB free=13.81 GiB"
        " tag=repack/model.layers.0.mlp.down_proj alloc=#12"
    )


def test_a_failure() -> None:
    event = replace(
        ALLOC,
        state=EventState.FAILED,
        sequence=717,
        size=606 * MIB,
        live=int(6.74 * GIB) + 1,
        free=int(13.81 * GIB) + 1,
        text="out of memory",
        why=Why.FRAGMENTATION,
        tag="kv",
        site="engine/kv_cache.py:88",
        requests=("a", "b"),
        request_count=5,
    )
    assert format_line(event, "cuda") == (
        "[cuda-alloc] FAILED #717 size=606.0 MiB live=6.74 GiB free=13.81 GiB err=out of memory"
        " why=fragmentation tag=kv site=engine/kv_cache.py:88 requests=a,b,+3"
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            replace(ALLOC, state=EventState.INTENT, site="x.py:1", free=None),
            "[cuda-alloc] PENDING #12 size=32.0 MiB tag=weights/model.layers.0.mlp.down_proj site=x.py:1",
        ),
        (
            replace(ALLOC, kind=EventKind.FREE, state=EventState.TORN, tag="kv", free=None),
            "[cuda-free]  TORN size=32.0 MiB tag=kv alloc=#12",
        ),
        (
            replace(ALLOC, tag="kv", free=None),
            "[cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=unknown tag=kv",
        ),
        (
            replace(
                ALLOC, tag="kv", free_is_read=False, api="async",
                pool_used=GIB, pool_reserved=3 * GIB, retries=1,
            ),
            "[cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=23.10 GiB tag=kv api=async"
            " pool_used=1.00 GiB pool_reserved=3.00 GiB retries=1 free_is=estimate",
        ),
        (TraceEvent(EventKind.NOTE, EventState.OK, 0, text="a b"), "[cuda-alloc] NOTE a b"),
        (
            TraceEvent(EventKind.BYPASS, EventState.OK, 5 * MIB, text="kind=module name=k"),
            "[cuda-alloc] BYPASS size=5.0 MiB kind=module name=k",
        ),
        (TraceEvent(EventKind.GAP, EventState.OK, 7, text="7 records"), "[cuda-alloc] GAP 7 records"),
    ],
)  # fmt: skip
def test_the_others(event: TraceEvent, line: str) -> None:
    assert format_line(event, "cuda") == line


def test_an_error_text_with_line_breaks_stays_one_line() -> None:
    event = replace(ALLOC, state=EventState.FAILED, text="out\nof\r\nmemory\t!", why=None)
    assert "err=out of memory ! why=unclassified" in format_line(event, "cuda")


# -- parsing -------------------------------------------------------------------------------------------------

words = st.text(st.characters(categories=["L", "N"], include_characters="./-_:"), min_size=1, max_size=20)


@given(
    kind=st.sampled_from([EventKind.ALLOC, EventKind.FREE]),
    state=st.sampled_from([EventState.OK, EventState.FAILED]),
    size=st.integers(0, 1 << 40),
    sequence=st.integers(1, 1 << 40),
    live=st.integers(0, 1 << 42),
    free=st.one_of(st.none(), st.integers(-(1 << 30), 1 << 42)),
    is_read=st.booleans(),
    names=st.tuples(words, words),
    ids=st.lists(words, max_size=3),
    more=st.integers(0, 5),
    pool=st.one_of(st.none(), st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40))),
    retries=st.integers(0, 3),
    error=st.tuples(
        st.sampled_from([None, *Why]), st.integers(0, 999), st.sampled_from(["out of memory", "a b"])
    ),
    device=st.sampled_from(["host", "cuda"]),
    prefix=st.sampled_from(["", "2026-01-01 INFO "]),
)
def test_what_was_printed_is_parsed(
    kind: EventKind, state: EventState, size: int, sequence: int, live: int, free: int | None, is_read: bool,
    names: tuple[str, str], ids: list[str], more: int, pool: tuple[int, int] | None, retries: int,
    error: tuple[Why | None, int, str], device: str, prefix: str,
) -> None:  # fmt: skip
    failed = state is EventState.FAILED
    event = TraceEvent(
        kind, state, size, sequence=sequence, live=live, free=free, free_is_read=is_read and free is not None,
        tag=f"weights/{names[0]}", site=names[1],
        requests=tuple(ids), request_count=len(ids) + (more if ids else 0),
        api="async", pool_used=pool[0] if pool else None, pool_reserved=pool[1] if pool else None,
        retries=retries, why=error[0] if failed else None, error_code=error[1] if failed else 0,
        text=error[2] if failed else "",
    )  # fmt: skip
    parsed = parse_line(prefix + format_line(event, device) + "\n")
    assert parsed is not None
    found_device, found = parsed
    assert found_device == device
    assert abs(found.size - size) <= 0.05 * MIB + 1
    assert abs(found.live - live) <= 0.005 * GIB + 1
    if free is None:
        assert found.free is None
    else:
        assert found.free is not None
        assert abs(found.free - free) <= 0.005 * GIB + 1
    if pool:
        assert found.pool_used is not None
        assert abs(found.pool_used - pool[0]) <= 0.005 * GIB + 1
    printed_site = event.site if kind is EventKind.ALLOC or failed else ""
    assert (found.kind, found.state, found.sequence) == (kind, state, sequence)
    assert (found.tag, found.site, found.requests) == (event.tag, printed_site, event.requests)
    assert (found.request_count, found.retries) == (event.request_count, retries)
    assert (found.why, found.error_code, found.text) == (event.why, event.error_code, event.text)
    assert found.free_is_read == event.free_is_read


@pytest.mark.parametrize(
    "line",
    [
        "[cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=23.10 GiB tag=weights/layers.0.mlp.down_proj",
        "[cuda-free]  size=2425.0 MiB live=6.74 GiB free=13.81 GiB tag=repack/model.layers.0.mlp.down_proj",
        "[cuda-alloc] FAILED #717 size=606.0 MiB live=6.74 GiB free=13.81 GiB err=out of memory",
        "[cuda-alloc] size=1.0 MiB",
    ],
)
def test_lines_of_others_parse(line: str) -> None:
    parsed = parse_line(line)
    assert parsed is not None
    device, event = parsed
    assert device == "cuda"
    assert event.size >= MIB
    assert (event.state is EventState.FAILED) == ("FAILED" in line)
    assert event.text == ("out of memory" if "err=" in line else "")


@given(st.text())
def test_any_other_line_is_none(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[cuda-alloc] NOTE x",
        "[cuda-alloc] #1 size=1.2.3 MiB",
        "[cuda-alloc] #1 size=1 MiB tag=a retries=x",
    ],
)
def test_half_a_line_is_none(line: str) -> None:
    assert parse_line(line) is None


# -- printing ------------------------------------------------------------------------------------------------


def test_a_closed_pipe_loses_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    writer = LineWriter(stream)
    for _ in range(3):
        writer.write("lost")
    assert writer.lost == 3
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_closed_stream_loses_lines_and_nothing_else() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    writer.write("there")
    assert stream.getvalue() == "there\n"
    stream.close()
    writer.write("lost")
    assert writer.lost == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115
    writer = LineWriter(stream)
    writer.write("lost")
    writer.write("lost")
    assert writer.lost == 2
    with pytest.raises(OSError, match="No space left"):
        stream.close()


def test_a_disk_that_has_room_again_is_printed_on() -> None:
    class Sometimes(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Sometimes()
    writer = LineWriter(stream)
    writer.write("one")
    stream.full = False
    writer.write("two")
    assert stream.getvalue() == "two\n"


def test_printing_while_printing_keeps_the_order() -> None:
    """As when the garbage collector runs a destructor in the middle of a write."""

    class Nested(io.StringIO):
        depth = 0

        def write(self, text: str) -> int:
            assert self.depth == 0, "written to while it is written to"
            self.depth += 1
            if text == "outer\n":
                writer.write("inner")
            self.depth -= 1
            return super().write(text)

    stream = Nested()
    writer = LineWriter(stream)
    writer.write("outer")
    writer.write("last")
    assert stream.getvalue() == "outer\ninner\nlast\n"


def test_threads_never_mix_their_lines() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        for step in range(200):
            writer.write(f"{number}-{step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert sorted(lines) == sorted(f"{number}-{step}" for number in range(4) for step in range(200))
    for number in range(4):
        mine = [line for line in lines if line.startswith(f"{number}-")]
        assert mine == [f"{number}-{step}" for step in range(200)]


def test_after_closing_the_stream_is_left_alone() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    writer.close()
    writer.write("late")
    assert stream.getvalue() == ""
    assert not stream.closed
