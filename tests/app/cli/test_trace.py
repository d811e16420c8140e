"""``vtserve trace``: its verbs over real traces, as a person calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.cli.trace.summary import describe_duration
from app.trace.exporters import EXPORTERS
from app.trace.source import open_trace
from engine.memory.lines import parse_line
from engine.memory.record import MAGIC
from tests.app.trace.making import MIB, TraceMaker, events_of

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: object, data: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)], prog_name="vtserve", input=data)


def output(*arguments: object, data: bytes | None = None) -> str:
    result = run(*arguments, data=data)
    assert result.exit_code == 0, result.output
    return result.stdout


def numbers(text: str) -> list[int]:
    """``#N`` of the lines' allocations."""
    parsed = [parse_line(line) for line in text.splitlines()]
    assert all(parsed)
    return [event.sequence for _, event in filter(None, parsed)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [1, 2, 3, 3, 4, 5, 5, 6]),
        (["--last", 2], [5, 6]),
        (["--min-size", "50MiB"], [1, 3, 3, 6]),
        (["--tag", "weights/"], [2, 4]),
        (["--tag", "*.1.mlp", "--kind", "alloc"], [4, 5]),
        (["--kind", "failed,free"], [3, 5, 6]),
        (["--kind", "failed,free", "--last", 1], [6]),
    ],
)
def test_show_chooses(loaded: SimpleNamespace, arguments: list[object], expected: list[int]) -> None:
    assert numbers(output("show", *arguments, loaded.path)) == expected


def test_show_as_json_is_a_trace_again(loaded: SimpleNamespace, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_text(output("show", "--json", loaded.path))
    assert events_of(copy) == events_of(loaded.path)
    assert numbers(output("show", "--last", "1", "-", data=copy.read_bytes())) == [6]


def test_show_follows_until_the_writer_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-m", "tests.app.trace_writer", path, "64"], **pipes) as writer:  # type: ignore[call-overload]
        assert writer.stdout.readline() == "ready\n"
        print(2, file=writer.stdin, flush=True)
        assert writer.stdout.readline() == "done\n"
        follow = [sys.executable, "-m", "app.cli", "trace", "show", "--follow", path]
        with subprocess.Popen(follow, stderr=subprocess.PIPE, **pipes) as reader:  # type: ignore[call-overload]
            assert [reader.stdout.readline().split()[1] for _ in range(2)] == ["#1", "#2"]
            print(1, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "done\n"
            assert reader.stdout.readline().split()[1] == "#3"
            writer.kill()
            writer.wait()
            rest, said = reader.communicate(timeout=60)
        assert (rest, reader.returncode) == ("", 0)
        assert said == f"process {writer.pid} ended without closing it\n"


def test_follow_wants_a_recorders_file() -> None:
    result = run("show", "--follow", "-", data=b'{"kind":"alloc","size":1}\n')
    assert result.exit_code == 2
    assert result.stderr == "Error: --follow -: only a flight recorder's file can be followed\n"


def test_summary_tells_the_failure_first(loaded: SimpleNamespace) -> None:
    lines = output("summary", loaded.path).splitlines()
    assert lines[0].startswith("[host-alloc] FAILED #6 size=64.0 MiB")
    assert "why=full tag=workspace" in lines[0]
    assert "peak 190.0 MiB at #5, 170.0 MiB live at the end" in lines
    table = lines[lines.index("") + 1 :]
    assert any(line.split()[:3] == ["kv", "1", "0"] for line in table)
    assert "  100.0 MiB  #1  kv" in output("summary", loaded.path)


def test_summary_in_short(loaded: SimpleNamespace) -> None:
    text = output("summary", "--top", 1, loaded.path)
    assert "and 3 more (--top 0)" in text
    assert "  90.0 MiB in smaller blocks" in text
    assert "model.layers.1.mlp" not in text.partition("live at the peak")[0].partition("by tag")[2]
    assert "weights/model.layers.1.mlp " in output("summary", "--full-tags", loaded.path)


def test_summary_as_json(loaded: SimpleNamespace) -> None:
    found = json.loads(output("summary", "--json", loaded.path))
    assert (found["peak"], found["failure"]["sequence"], found["failure"]["why"]) == (190 * MIB, 6, "full")
    assert sum(group["at_peak"] for group in found["by_tag"]) == found["peak"]
    assert sum(block["size"] for block in found["at_peak"]) == found["peak"]


def test_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(
        '{"kind":"failed","of":"alloc","size":1,"tag":"kv\\u001b[31m\\nx","site":"a\\u009b","text":"\\u0007"}\n'
    )
    for verb in ("show", "summary"):
        text = output(verb, path)
        assert "kv?[31m?x" in text
        assert not any(
            (character < " " and character != "\n") or "\x7f" <= character <= "\x9f" for character in text
        )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty: expected a trace"),
        (b"\n \n", "is empty: expected a trace"),
        (b"GGUF\x03", "is no trace: expected a flight recorder's file or JSON lines"),
        (MAGIC, "8 bytes are too short for a header"),
        (MAGIC + bytes(5000), "format version 0, expected 1"),
        (b"{", "line 1: not a JSON object"),
    ],
)
@pytest.mark.parametrize("verb", ["show", "summary", "replay"])
def test_what_is_no_trace_is_told_in_a_line(verb: str, data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "what"
    path.write_bytes(data)
    result = run(verb, path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {path}: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert (
        run("show", tmp_path / "no").stderr
        == f"Error: {tmp_path}/no: cannot be opened: No such file or directory\n"
    )
    assert "Is a directory" in run("summary", tmp_path).stderr


def test_replay_compares_the_allocators(loaded: SimpleNamespace) -> None:
    lines = output("replay", loaded.path).splitlines()
    assert lines[:2] == [
        "6 requests and 2 frees, no limit",
        "most asked for at once: 234.0 MiB at #6",
    ]
    rows = {line.split()[0]: line.split() for line in lines[4:7]}
    assert rows["malloc"][1:6] == ["2.0", "MiB", "234.0", "MiB", "#6"]
    assert rows["pool"][1:5] == ["32.0", "MiB", "256.0", "MiB"]
    assert lines[-1] == "slab: of 1 requests that failed in the trace 1 would succeed"


def test_replay_tells_the_first_failure_and_ends_with_3(loaded: SimpleNamespace) -> None:
    result = run("replay", "--allocator", "malloc", "--capacity", "141MiB", loaded.path)
    assert result.exit_code == 3
    line = next(line for line in result.stdout.splitlines() if line.startswith("malloc: FAILED"))
    assert line.startswith(
        "malloc: FAILED #3 size=50.0 MiB why=full tag=repack/model.layers.0.mlp site=tests/"
    )
    assert "11.0 MiB are free, 10.0 MiB in one piece" in result.stdout
    assert "pool" not in result.stdout


def test_replay_as_json(loaded: SimpleNamespace) -> None:
    result = run("replay", "--json", "--capacity", "160MiB", "--granularity", "10MiB", loaded.path)
    assert result.exit_code == 3
    found = {entry["allocator"]: entry for entry in json.loads(result.stdout)}
    assert list(found) == ["malloc", "pool", "slab"]
    assert found["malloc"]["first_failure"]["sequence"] == 3
    assert {entry["granularity"] for entry in found.values()} == {10 * MIB}
    assert {entry["capacity"] for entry in found.values()} == {160 * MIB}
    assert json.loads(output("replay", "--json", loaded.path))[0]["capacity"] is None


def test_replay_refuses_steps_that_are_none(loaded: SimpleNamespace) -> None:
    result = run("replay", "--granularity", "1000", loaded.path)
    assert result.exit_code == 2
    assert result.stderr == "Error: --granularity: a granularity of 1000 bytes is no multiple of 512\n"


def test_diff_tells_what_changed(loaded: SimpleNamespace, make_trace: Callable[..., TraceMaker]) -> None:
    same = output("diff", loaded.path, loaded.path)
    assert "all 5 allocations are the same" in same
    other = make_trace("other")
    other.allocate("kv", 110 * MIB, "kv")
    lines = output("diff", "--ignore-lines", loaded.path, other.close()).splitlines()
    assert lines[0].startswith("before: [host-alloc] FAILED #6 size=64.0 MiB")
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["peak"][1:] == ["190.0", "MiB", "110.0", "MiB", "-80.0", "MiB"]
    assert rows["kv"][1:] == [
        "tests/app/trace/making.py",
        "1",
        "1",
        "-",
        "-",
        "1",
        "-",
        "-",
        "-",
        "+10.0",
        "MiB",
    ]
    assert rows["weights/model.layers.*.mlp"][2:6] == ["2", "0", "-", "2"]
    assert "0 allocations are the same, 5 differ" in lines


def test_diff_as_json(loaded: SimpleNamespace, make_trace: Callable[..., TraceMaker]) -> None:
    other = make_trace("other")
    other.allocate("kv", 110 * MIB, "kv")
    found = json.loads(output("diff", "--json", loaded.path, other.close()))
    grown = next(change for change in found["changes"] if change["tag"] == "kv")
    assert (grown["before"], grown["after"], grown["ordinal"]) == (100 * MIB, 110 * MIB, 1)
    assert "and 2 more (--top 0)" in output("diff", "--top", 1, loaded.path, other.path)


@pytest.mark.parametrize("form", list(EXPORTERS))
def test_export_writes_what_the_exporter_makes(form: str, loaded: SimpleNamespace, tmp_path: Path) -> None:
    for package in EXPORTERS[form].packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    with open_trace(loaded.path) as trace:
        expected = b"".join(EXPORTERS[form].encode(trace.events(), trace.header))
    out = tmp_path / "out"
    assert output("export", "--format", form, "--out", out, loaded.path) == ""
    assert out.read_bytes() == expected
    assert run("export", "--format", form, loaded.path).stdout_bytes == expected
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_export_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    source, out = tmp_path / "t.ndjson", tmp_path / "out.csv"
    source.write_text('{"kind":"alloc","size":1}\n' * 5000 + "{")
    out.write_text("before")
    result = run("export", "--format", "rmm-csv", "--out", out, source)
    assert (result.exit_code, result.stderr) == (1, f"Error: {source}: line 5001: not a JSON object\n")
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "t.ndjson"]
    missing = tmp_path / "no" / "out.csv"
    result = run("export", "--format", "rmm-csv", "--out", missing, source)
    assert (result.exit_code, result.stderr) == (2, f"Error: --out {missing}: No such file or directory\n")


def test_binary_is_not_sent_to_a_terminal(loaded: SimpleNamespace) -> None:
    master, slave = os.openpty()
    command = [sys.executable, "-m", "app.cli", "trace", "export", "--format", "torch-snapshot", loaded.path]
    done = subprocess.run(
        command, stdout=slave, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False
    )
    os.close(slave)
    os.close(master)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --format torch-snapshot is binary: give --out FILE")


def test_import_makes_a_trace_of_a_snapshot_and_of_a_log(loaded: SimpleNamespace, tmp_path: Path) -> None:
    snapshot, log, out = tmp_path / "s.pickle", tmp_path / "log", tmp_path / "t.ndjson"
    output("export", "--format", "torch-snapshot", "--out", snapshot, loaded.path)
    log.write_text("a server starts\n" + output("show", loaded.path))
    for source in (snapshot, log):
        output("import", "--out", out, source)
        found = json.loads(output("summary", "--json", out))
        assert (found["peak"], found["live"], found["failure"]["size"]) == (190 * MIB, 170 * MIB, 64 * MIB)
    assert run("import", "--format", "torch-snapshot", log).exit_code == 1
    lines = output("import", "--format", "log", log).splitlines()
    assert json.loads(lines[0])["kind"] == "header"
    assert run("import", "--device", 3, snapshot).stderr == "Error: --device 3: expected one of 0\n"


@pytest.mark.parametrize("source", ["-", "/dev/stdin"])
def test_pipes_are_read(loaded: SimpleNamespace, source: str) -> None:
    def piped(data: bytes, *arguments: str) -> bytes:
        command = [sys.executable, "-m", "app.cli", "trace", *arguments, source]
        return subprocess.run(
            command, input=data, capture_output=True, cwd=ROOT, timeout=60, check=True
        ).stdout

    log = output("show", loaded.path).encode()
    for data in (log, run("export", "--format", "torch-snapshot", loaded.path).stdout_bytes):
        lines = piped(data, "import")
        assert json.loads(piped(lines, "summary", "--json"))["peak"] == loaded.peak


def test_a_full_disk_is_named_by_its_file(loaded: SimpleNamespace) -> None:
    result = run("export", "--format", "ndjson", "--out", "/dev/full", loaded.path)
    assert (result.exit_code, result.stderr) == (1, "Error: /dev/full: No space left on device\n")


def test_closed_reader_is_quiet(make_trace: Callable[..., TraceMaker]) -> None:
    maker = make_trace()
    for number in range(2000):
        maker.allocate(str(number), 1, "weights/a.long.name.that.fills.the.pipe.of.whoever.reads")
    command = [sys.executable, "-m", "app.cli", "trace", "show", maker.close()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_every_verbs_help_fits_a_screen_and_ends_with_an_example() -> None:
    verbs = main.get_command(None, "trace").lazy_commands  # type: ignore[attr-defined, arg-type, union-attr]
    assert verbs
    for verb in verbs:
        result = CliRunner().invoke(main, ["trace", verb, "--help"], prog_name="vtserve", terminal_width=80)
        lines = result.stdout.splitlines()
        assert (result.exit_code, len(lines) <= 24, max(map(len, lines)) <= 80) == (0, True, True), verb
        assert "  Examples:" in lines, verb
        assert lines[-1].startswith("    "), verb


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0.0 µs"),
        (3_240, "3.2 µs"),
        (41_000_000, "41.0 ms"),
        (12_500_000_000, "12.5 s"),
        (600 * 10**9, "10 min"),
        (7_500 * 10**9, "2 h 05 min"),
    ],
)
def test_durations(ns: int, text: str) -> None:
    assert describe_duration(ns) == text
