"""What the tools over a recorded trace take.

Claims: 65,536 records are summarised in less than 0.3 s; a trace of 1,000,000 records is exported in less
than 20 s to any format, in memory that does not grow with the trace. Prints a table and writes
benchmarks/results/trace_tools.json.

The traces are flight recorders' files written by the recorder, of a program that holds 2,000 blocks of 256
tags at most. Each measurement is a process of its own: its time is from opening the file to the last byte
written (to a file), its memory the most that was resident.

    python benchmarks/trace_tools.py [--records 1000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.trace.allocators import ALLOCATORS
from app.trace.exporters import EXPORTERS
from app.trace.replay import replay
from app.trace.source import open_trace
from app.trace.summary import summarize
from app.trace.table import read_table
from engine.memory.record import EventKind, EventState, TraceHeader
from engine.memory.recorder import FlightRecorder

RESULT = Path(__file__).parent / "results" / "trace_tools.json"
SMALL = 65_536
MOST_LIVE = 2_000
ENDLESS = 1 << 60
SUMMARY_TARGET_S = 0.3
EXPORT_TARGET_S = 20.0
GROWTH_TARGET_MIB = 48.0
"""how much more a trace of any length may take than one of 65,536 records"""


def write_trace(path: Path, records: int) -> None:
    """Record `records` allocations and frees of a program that goes on."""
    chance = random.Random(0)
    header = TraceHeader(capacity=records, device="cuda", api="malloc", total=24 << 30)
    recorder = FlightRecorder.create(path, header)
    names = ("gate_proj", "up_proj", "down_proj", "o_proj")
    tags = [f"weights/model.layers.{layer}.mlp.{name}" for layer in range(64) for name in names]
    sites = [f"engine/backend/cuda/linear.py:{line}" for line in range(40)]
    live: list[tuple[int, int, int, str, str]] = []
    total = sequence = 0
    for _ in range(records):
        if len(live) >= MOST_LIVE or (live and chance.random() < 0.48):
            place = chance.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            number, pointer, size, tag, site = live.pop()
            index = recorder.begin(EventKind.FREE, number, size, pointer, 0, b"malloc", tag, site, ())
            total -= size
        else:
            sequence += 1
            number, size = sequence, chance.choice((512, 4096, 1 << 20, 8 << 20))
            tag, site, pointer = chance.choice(tags), chance.choice(sites), (1 << 44) + (sequence << 23)
            index = recorder.begin(EventKind.ALLOC, number, size, 0, 0, b"malloc", tag, site, ())
            total += size
            live.append((number, pointer, size, tag, site))
        recorder.end(index, EventState.OK, pointer, total, (24 << 30) - total, size >= 16 << 20)
    recorder.close()


def run_summary(path: Path, out: Path) -> None:
    with open_trace(path) as trace:
        out.write_text(str(summarize(read_table(trace)).peak))


def run_replay(path: Path, out: Path) -> None:
    with open_trace(path) as trace:
        table = read_table(trace)
    out.write_text(str(replay(table, ALLOCATORS["pool"](ENDLESS)).reserved_peak.reserved))


def run_export(path: Path, out: Path, name: str) -> None:
    with open_trace(path) as trace, out.open("wb") as stream:
        EXPORTERS[name].export(trace.events(), trace.header, stream)


def one(what: str, path: Path, out: Path, rounds: int) -> None:
    """In a process of its own: do `what`, and print how long it took and how much memory."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        match what.split():
            case ["summary"]:
                run_summary(path, out)
            case ["replay"]:
                run_replay(path, out)
            case ["export", name]:
                run_export(path, out, name)
        seconds.append(time.perf_counter() - start)
    # Not getrusage: what it says begins with what the process was that this one was made from.
    status = Path("/proc/self/status").read_text()
    most = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({"seconds": statistics.median(seconds), "rss_mib": most, "bytes": out.stat().st_size}))


def measured(what: str, path: Path, out: Path, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", what, str(path), str(out), "--rounds", str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, path, out = options.one
        one(what, Path(path), Path(out), options.rounds)
        return

    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        small, large, out = Path(folder) / "small", Path(folder) / "large", Path(folder) / "out"
        write_trace(small, SMALL)
        write_trace(large, options.records)
        for what in ("summary", "replay", *(f"export {name}" for name in EXPORTERS)):
            rows[what] = {
                "small": measured(what, small, out, options.rounds),
                "large": measured(what, large, out, 1),
            }

    print(f"{'':24}{f'{SMALL:,} records':>22}{f'{options.records:,} records':>26}")
    missed = []
    for what, row in rows.items():
        few, many = row["small"], row["large"]
        growth = many["rss_mib"] - few["rss_mib"]
        verdict = ""
        if what == "summary":
            met = few["seconds"] < SUMMARY_TARGET_S
            verdict = f"target < {SUMMARY_TARGET_S:g} s for the first: {'met' if met else 'MISSED'}"
        elif what.startswith("export"):
            met = many["seconds"] < EXPORT_TARGET_S and growth < GROWTH_TARGET_MIB
            verdict = f"target < {EXPORT_TARGET_S:g} s, < {GROWTH_TARGET_MIB:g} MiB more: "
            verdict += "met" if met else "MISSED"
        else:
            met = True
        if not met:
            missed.append(what)
        print(
            f"{what:24}{few['seconds']:9.2f} s {few['rss_mib']:6.0f} MiB"
            f"{many['seconds']:11.2f} s {many['rss_mib']:6.0f} MiB   {verdict}"
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "records": {"small": SMALL, "large": options.records},
                "targets": {
                    "summary_seconds": SUMMARY_TARGET_S,
                    "export_seconds": EXPORT_TARGET_S,
                    "export_growth_mib": GROWTH_TARGET_MIB,
                },
                "missed": missed,
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
