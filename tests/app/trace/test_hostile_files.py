"""Whatever a file holds, each tool gives a result or one line, and never a traceback."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.cli.plain_text import printable
from app.cli.trace.diff import diff_lines
from app.cli.trace.replay import replay_lines
from app.cli.trace.summary import summary_lines
from app.trace.allocators import ALLOCATORS
from app.trace.diff import compare
from app.trace.exporters import EXPORTERS
from app.trace.replay import replay
from app.trace.source import open_trace
from app.trace.summary import summarize
from app.trace.table import TraceTable, read_table
from engine.errors import ConfigurationError
from engine.memory.errors import TraceFileError
from engine.memory.lines import format_line
from engine.memory.record import (
    ASKED_CRC_AT,
    HAS_TEXT,
    OUTCOME_AT,
    OUTCOME_CRC_AT,
    RECORD_BYTES,
    RECORD_DTYPE,
    TEXT_AT,
    TraceHeader,
)
from tests.app.trace.making import MIB, TraceMaker


def lines(path: Path) -> None:
    with open_trace(path) as trace:
        for event in trace.events():
            assert "\n" not in printable(format_line(event, trace.header.device))


def table_of_file(path: Path) -> TraceTable:
    with open_trace(path) as trace:
        return read_table(trace)


def summary(path: Path) -> None:
    found = summarize(table_of_file(path))
    assert list(summary_lines(found, 5))
    assert found.to_dict()


def diff(path: Path) -> None:
    table = table_of_file(path)
    found = compare(table, table)
    assert found.changes == []
    assert list(diff_lines(found, 5))


def replays(path: Path) -> None:
    table = table_of_file(path)
    found = [replay(table, kind(64 << 30)) for kind in ALLOCATORS.values()]
    assert list(replay_lines(found, 64 << 30))


def export(name: str) -> Callable[[Path], None]:
    def tool(path: Path) -> None:
        with open_trace(path) as trace:
            for piece in EXPORTERS[name].encode(trace.events(), trace.header):
                assert isinstance(piece, bytes)

    return tool


def tools() -> Iterator[Callable[[Path], None]]:
    yield from (lines, summary, diff, replays)
    for exporter in EXPORTERS.values():
        try:
            exporter.encode([], TraceHeader(capacity=1))
        except ConfigurationError:  # a package is missing
            continue
        yield export(exporter.name)


TOOLS = list(tools())


def use(path: Path) -> int:
    """Everything that can be done with a trace: how many tools had a result. The others have one line."""
    results = 0
    for tool in TOOLS:
        said = ""
        try:
            tool(path)
            results += 1
        except TraceFileError as error:
            said = str(error)
        assert len(said.splitlines()) <= 1
        assert len(said) < 500
    return results


CAPACITY = 6
words = st.integers(0, (1 << 64) - 1)
figures = st.integers(0, (1 << 63) - 1)
signed = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1 << 30)
names = st.binary(max_size=12) | st.sampled_from(
    [b"kv", b"weights/a.0.b", b"x\x00y", b"\xff\xfe", b"\x1b[31m"]
)
some_records = st.fixed_dictionaries(
    {
        "tag": names,
        "site": names,
        "requests": names,
        "api": st.binary(max_size=8),
        "sequence": words | st.integers(0, 3),
        "size": st.integers(0, 1 << 40) | st.integers(0, (1 << 63) - 1) | signed,
        "asked_pointer": words,
        "stream": words,
        "thread": words,
        "started_ns": words,
        "wall_ns": words,
        "kind": st.integers(0, 255) | st.integers(1, 5),
        "request_count": st.integers(0, 65535),
        "pointer": words | st.integers(0, 3),
        "live": signed,
        "free": signed,
        "pool_used": signed,
        "pool_reserved": signed,
        "finished_ns": words,
        "error_code": st.integers(-(1 << 31), (1 << 31) - 1),
        "retries": st.integers(0, 65535),
        "state": st.integers(0, 255) | st.integers(1, 2),
        "why": st.integers(0, 255),
        "flags": st.integers(0, 255),
        "text": names,
    }
)


def file_of(rows: list[dict[str, object]], header: TraceHeader) -> bytes:
    """A flight recorder's file with the right checksums, whatever is in its records."""
    records = np.zeros(header.capacity, RECORD_DTYPE)
    for place, row in enumerate(rows):
        for name, value in row.items():
            records[name][place] = value
        records["index"][place] = records["outcome_index"][place] = place + 1
        at = place * RECORD_BYTES
        data = records.tobytes()[at : at + RECORD_BYTES]
        records["asked_crc"][place] = zlib.crc32(data[:ASKED_CRC_AT])
        crc = zlib.crc32(data[OUTCOME_AT:OUTCOME_CRC_AT])
        if records["flags"][place] & HAS_TEXT:
            crc = zlib.crc32(data[TEXT_AT:], crc)
        records["outcome_crc"][place] = crc
    return header.to_bytes() + records.tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "trace"


@settings(max_examples=150)
@given(rows=st.lists(some_records, max_size=CAPACITY), total=figures, pid=figures, device=st.text(max_size=9))
def test_records_of_any_content(
    rows: list[dict[str, object]], total: int, pid: int, device: str, path: Path
) -> None:
    header = TraceHeader(capacity=CAPACITY, device=device, total=total, pid=pid, created_wall_ns=pid)
    path.write_bytes(file_of(rows, header))
    use(path)


def test_such_records_are_read(path: Path) -> None:
    """The test above is of records, and not of a refusal of all of them."""
    row = {"tag": b"kv", "size": 5, "kind": 1, "state": 1, "sequence": 1, "pointer": 8, "live": 5}
    path.write_bytes(file_of([row, row | {"sequence": 2}], TraceHeader(capacity=CAPACITY)))
    assert summarize(table_of_file(path)).peak == 10
    assert use(path) == len(TOOLS)


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    maker = TraceMaker(tmp_path / "good", records=64, capacity=100 * MIB)
    for number in range(20):
        maker.allocate(str(number), MIB, f"weights/model.layers.{number}.mlp")
    maker.fail(90 * MIB, "kv")
    maker.free("0", "1")
    data = maker.close().read_bytes()
    maker.free(*list(maker.buffers))
    return data


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=20))
def test_damaged_recorders_files(good: bytes, places: list[tuple[int, int]], path: Path) -> None:
    data = bytearray(good)
    for place, value in places:
        data[place % len(data)] = value
    path.write_bytes(data)
    use(path)


@pytest.mark.parametrize("length", [0, 7, 8, 24, 4095, 4096, 4097, 5000])
def test_truncated_recorders_files(good: bytes, length: int, path: Path) -> None:
    path.write_bytes(good[:length])
    assert use(path) == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FIELDS = """kind of state size sequence tag site requests api pointer live free stream thread started_ns
    finished_ns wall_ns pool_used pool_reserved why text index retries error_code device total pid"""
json_lines = st.dictionaries(
    st.sampled_from(re.findall(r"\w+", FIELDS)),
    json_values | st.sampled_from(["alloc", "free", "header", "ok", "failed", "kv", 5, 1 << 62, -(1 << 62)]),
    max_size=9,
)


@settings(max_examples=200)
@given(written=st.lists(json_lines, max_size=5))
def test_lines_of_any_content(written: list[dict[str, object]], path: Path) -> None:
    path.write_text("".join(json.dumps({"kind": "alloc"} | line) + "\n" for line in written))
    use(path)
