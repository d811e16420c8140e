"""What it takes to plan the load of a 27B-class model.

Claim: from the command to the verdict in less than 2 s and 300 MB, with nothing of the model but its headers;
also where it does not fit, and levers are found by planning again. Prints a table and writes
benchmarks/results/plan_27b.json.

The checkpoint is that of `benchmarks/gpu_reference_run.py`, with true headers over holes: 64 layers, hidden
5120, intermediate 17408, 40 heads and 8 KV heads of 128, vocabulary 151,936. Each run is a process.

    python benchmarks/plan_27b.py [--runs 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.synthetic import LARGE, describe, tensors  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "plan_27b.json"
MOST_SECONDS = 2.0
MOST_BYTES = 300 * 10**6
CASES = {
    "fits a 24 GB card": (0, ["--gpu", "rtx-4090", "--device-memory", "23.6GiB"]),
    "does not fit, levers found": (3, ["--gpu", "l4", "--device-memory", "18.5GiB"]),
    "does not fit at all": (3, ["--gpu", "l4", "--device-memory", "16GiB"]),
    "fits the CPU device": (0, ["--device", "cpu", "--device-memory", "64GiB"]),
}
"""status and flags"""


def write_sparse_checkpoint(directory: Path, shape: dict[str, int] | None = None) -> int:
    """The model of `benchmarks/gpu_reference_run.py` without its weights; returns the bytes it seems to have.

    64 layers, hidden 5120, intermediate 17408, 40 heads and 8 KV heads of 128, vocabulary 151,936, NVFP4 in
    the MLP, FP8 in attention, tables in BF16, if no other `shape` is given.
    """
    shape = LARGE if shape is None else shape
    directory.mkdir(parents=True, exist_ok=True)
    config, header, end = describe(shape, list(tensors(shape)))
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        # The embedding table comes first. Its beginning tells it from the output table, which is all zeros.
        file.write(b"\x3c" * 4096)
        file.truncate(len(header) + end)
    return end


def measure(model: Path, status: int, flags: list[str]) -> tuple[float, int, dict[str, Any]]:
    """Seconds, most bytes resident, and the plan."""
    command = [sys.executable, "-m", "app.cli", "plan", str(model), "--json", *flags]
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=output) as process:
            _, code, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(code)
        seconds = time.perf_counter() - begin
        assert process.returncode == status, f"{command} ended with {process.returncode}"
        output.seek(0)
        return seconds, usage.ru_maxrss << 10, json.load(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "runs": options.runs,
        "targets": {"seconds": MOST_SECONDS, "bytes": MOST_BYTES},
        "cases": {},
    }
    print(f"{'':28}  {'seconds':>8}  {'slowest':>8}  {'MB':>6}  {'requests':>8}  levers")
    with tempfile.TemporaryDirectory() as directory:
        results["checkpoint_bytes"] = write_sparse_checkpoint(Path(directory))
        for name, (status, flags) in CASES.items():
            runs = [measure(Path(directory), status, flags) for _ in range(options.runs)]
            seconds = [run[0] for run in runs]
            most, plan = max(run[1] for run in runs), runs[0][2]
            levers = [f"{lever['flag']} {lever['value']}" for lever in plan["levers"] if lever["verified"]]
            results["cases"][name] = {
                "flags": " ".join(flags),
                "seconds_median": round(statistics.median(seconds), 3),
                "seconds_slowest": round(max(seconds), 3),
                "peak_resident_bytes": most,
                "requests": plan["requests"],
                "fits": plan["fits"],
                "levers": levers,
                "within_targets": statistics.median(seconds) < MOST_SECONDS and most < MOST_BYTES,
            }
            print(
                f"{name:28}  {statistics.median(seconds):8.2f}  {max(seconds):8.2f}  {most / 1e6:6.0f}"
                f"  {plan['requests']:8}  {', '.join(levers)}"
            )
    RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
