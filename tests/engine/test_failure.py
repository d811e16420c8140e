from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import failure
from engine.config import EngineConfig
from engine.failure import FailureReporter, failure_directory, summarize_error
from engine.failure_record import read_failure
from engine.memory.base import Overheads
from engine.memory.causes import CAUSES
from engine.memory.errors import AllocationRequest, OutOfMemoryError, Why
from engine.memory.house import MemoryHouse
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings


def reporter_in(directory: Path) -> FailureReporter:
    return FailureReporter(directory, EngineConfig(model="m", max_num_seqs=3), output=io.StringIO())


def said(reporter: FailureReporter) -> list[str]:
    assert isinstance(reporter.output, io.StringIO)
    return reporter.output.getvalue().splitlines()


def out_of_memory(house: MemoryHouse) -> OutOfMemoryError:
    with memory_scope("weights/lm_head"), pytest.raises(OutOfMemoryError) as caught:
        house.resource.allocate(10_000)
    return caught.value


def test_a_record_of_a_failed_load(tmp_path: Path) -> None:
    house = MemoryHouse.build(HostMemoryResource(8_000), TraceSettings(trace=True, stats=True))
    with memory_scope("weights/model.norm"):
        kept = house.resource.allocate(3_000)
    reporter = reporter_in(tmp_path / "not" / "there" / "yet")
    reporter.house = house
    record = reporter.report(out_of_memory(house), doing="loading /models/m", fatal=True)
    kept.close()

    assert record.path is not None
    data = json.loads(Path(record.path).read_text())
    assert data["what"].startswith("allocation #2 of 9.8 KiB failed: out of memory (why=full api=host")
    assert data["allocation"] == {
        "api": "host",
        "size": 10_000,
        "tag": "weights/lm_head",
        "site": data["allocation"]["site"],
        "sequence": 2,
        "why": "full",
        "cause": CAUSES[Why.FULL].meaning,
        "usually_helps": CAUSES[Why.FULL].helps,
        "error": "out of memory",
        "error_code": 0,
        "free": 5_000,
        "live": 3_000,
        "requests": [],
    }
    assert data["allocation"]["site"].startswith("tests/engine/test_failure.py:")
    assert data["ledger"]["tags"] == {"weights/model.norm": 3_000}
    assert (data["ledger"]["total"], data["ledger"]["free"], data["ledger"]["residual"]) == (8_000, 5_000, 0)
    assert data["statistics"]["failures_by_why"] == {"full": 1}
    assert any("FAILED #2" in line for line in data["trace"])
    assert data["config"]["max_num_seqs"] == 3
    assert {"python", "numpy", "cuda-core"} <= data["versions"].keys()
    assert (data["fatal"], data["step"], data["requests"], data["pid"]) == (True, None, [], os.getpid())
    assert data["exception"]["type"] == "engine.memory.errors.OutOfMemoryError"
    assert read_failure(Path(record.path)).id == record.id
    assert said(reporter)[0].startswith("engine-fatal: loading /models/m: allocation #2 of 9.8 KiB failed")
    assert str(reporter.dead(record)) == f"the engine did not start; failure record: {record.path}"


def test_what_is_unknown_is_left_out(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path)
    record = reporter.report(OSError(5, "Input/output error"), doing="loading m", fatal=True)
    assert said(reporter) == ["engine-fatal: loading m: Input/output error"]
    assert record.allocation is record.ledger is record.step is None


def test_a_device_that_answers_nothing_does_not_stop_the_record(tmp_path: Path) -> None:
    class Lost(HostMemoryResource):
        def overheads(self) -> Overheads:
            raise RuntimeError("the context is lost")

    reporter = reporter_in(tmp_path)
    reporter.house = MemoryHouse.build(Lost(100), TraceSettings())
    reporter.levers = lambda request: 1 / 0  # type: ignore[assignment,return-value]
    record = reporter.report(
        OutOfMemoryError(AllocationRequest(size=5)), doing="EngineCore busy loop", fatal=True
    )
    assert record.path is not None
    assert record.ledger is None
    assert record.levers == []


def test_a_directory_that_cannot_be_made_is_said_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reporter = reporter_in(tmp_path / "file" / "failures")
    record = reporter.report(RuntimeError("x"), doing="loading m", fatal=True)
    assert record.path is None
    directory = tmp_path / "file" / "failures"
    assert said(reporter)[-1] == (
        f"engine-fatal: failure record {record.id} cannot be written: {directory}: Not a directory"
    )
    assert (
        str(reporter.dead(record)) == f"the engine did not start; failure record: {record.id} (not written)"
    )


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failure.os, "fsync", no_space)
    reporter = reporter_in(tmp_path)
    record = reporter.report(RuntimeError("x"), doing="loading m", fatal=True)
    assert record.path is None
    assert said(reporter)[-1].endswith("No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_utf8_has_its_records(tmp_path: Path) -> None:
    record = reporter_in(tmp_path / "f\udcff").report(RuntimeError("x"), doing="loading m", fatal=True)
    assert record.path == rf"{tmp_path}/f\xff/{record.id}.json"
    [written] = (tmp_path / "f\udcff").iterdir()
    assert read_failure(written) == record


def test_a_closed_stderr_does_not_stop_the_record(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path)
    reporter.output.close()
    assert reporter.report(RuntimeError("x"), doing="loading m", fatal=True).path is not None


def test_a_failure_of_one_request_prints_nothing(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path)
    record = reporter.report(RuntimeError("x"), doing="EngineCore busy loop", fatal=False)
    assert said(reporter) == []
    assert record.path is not None
    assert not record.fatal


def test_records_are_not_readable_by_others(tmp_path: Path) -> None:
    record = reporter_in(tmp_path).report(RuntimeError("x"), doing="loading m", fatal=True)
    assert record.path is not None
    assert Path(record.path).stat().st_mode & 0o077 == 0


def test_a_file_that_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"id": 3}')
    with pytest.raises(msgspec.DecodeError):
        read_failure(tmp_path / "x.json")


def test_where_records_go() -> None:
    config = EngineConfig(model="m")
    assert failure_directory(config, {"XDG_STATE_HOME": "/state"}) == Path("/state/vtserve/failures")
    assert failure_directory(config, {}) == Path("~/.local/state/vtserve/failures").expanduser()
    assert failure_directory(EngineConfig(model="m", failure_dir="/f"), {"XDG_STATE_HOME": "/s"}) == Path(
        "/f"
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\n  b"), "ValueError: a b"),
        (ValueError(), "ValueError"),
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (OutOfMemoryError(AllocationRequest(size=1)), "allocation of 1 B failed"),
    ],
)
def test_errors_in_one_line(error: Any, text: str) -> None:
    assert summarize_error(error).startswith(text)
    assert "\n" not in summarize_error(error)
