"""Everything that is claimed of the CUDA backend's correctness and of its memory, checked on a GPU in one
call.

Each part is a process of its own with a time limit, and writes what it found as it goes, so that one that
fails, hangs or loses the context takes nothing with it. ``gpu_check.json`` holds them all:

- ``device_tests``: the kernels' own tests (``pytest -m gpu``)
- ``checkpoints``: every small checkpoint against transformers' logits, and layer 0's stored bytes
- ``graphs``: decode steps as CUDA graphs against the same steps kernel by kernel
- ``ledger-malloc``, ``ledger-pool``: the ledger after load and after forwards, residual within 64 MiB
- ``observed-malloc``, ``observed-pool``: the same while CUPTI looks for what goes past the allocator
- ``resources``: both allocators through the tests that all memory resources share
- ``bypass``: allocations behind the allocator's back, by every way there is, and CUPTI finds them
- ``out_of_memory``: failures of the real driver and what they are classified as
- ``commands``: generate, perplexity and serve as a person starts them, out of memory and killed as well
- ``lost_context``: after a kernel's illegal access
- ``memcheck``, ``racecheck``: compute-sanitizer over a short generation
- ``agreement``: greedy tokens of CPU and CUDA on a real model, near-ties listed (with ``--model``)
- ``reference-malloc``, ``reference-pool``: a 27B-class model under 24 GiB and under 16
  (``benchmarks/gpu_reference_run.py``; with ``--reference``, where its checkpoint is made)

Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.results import commit  # noqa: E402

TINY = "qwen3/NVFP4-modelopt"
MIXED = "llama-mixed/MIXED-modelopt"


@dataclass(frozen=True)
class Part:
    """A command, and how long it may take. Parts that are `alone` watch the device's free memory."""

    name: str
    command: list[str]
    seconds: int
    alone: bool = True
    writes: bool = True
    """takes ``--out`` and writes JSON"""
    environ: dict[str, str] = field(default_factory=dict)


def module(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu.{name}", *map(str, arguments)]


def parts(arguments: argparse.Namespace) -> list[Part]:
    checkpoints: Path = arguments.checkpoints
    tiny, mixed = checkpoints / TINY, checkpoints / MIXED
    # Options of our own: the machine's pytest may lack plugins that the project's settings name.
    pytest = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT)]
    pytest += ["-p", "no:cacheprovider", "--import-mode=importlib", "-m", "gpu", "-q", "--tb=short", "-rs"]
    pytest += ["-o", "markers=gpu: needs a CUDA device"]
    generation = module("generation", tiny, mixed)
    sanitizer = ["compute-sanitizer", "--error-exitcode", "99", "--print-limit", "20"]
    found = [
        Part("device_tests", [*pytest, "tests/backend/cuda"], 200, alone=False, writes=False),
        Part("checkpoints", module("checkpoints", "--checkpoints", checkpoints), 240, alone=False),
        Part("graphs", module("graphs", tiny, mixed), 150, alone=False),
        # Calls that fail by design (a pointer's attributes, say) are no memory errors.
        Part(
            "memcheck",
            [*sanitizer, "--tool", "memcheck", "--report-api-errors", "no", *generation],
            150,
            False,
            False,
        ),
        Part("racecheck", [*sanitizer, "--tool", "racecheck", *generation], 150, False, False),
    ]
    for allocator in ("malloc", "pool"):
        ledger = module("ledger", "--model", arguments.model or mixed, "--allocator", allocator)
        found += [
            Part(f"ledger-{allocator}", ledger, 60),
            Part(f"observed-{allocator}", [*ledger, "--observe"], 60),
        ]
    found += [
        Part("resources", [*pytest, "tests/memory/test_every_resource.py"], 60, writes=False),
        Part("bypass", [*pytest, "tests/memory/cuda/test_bypass_on_device.py"], 60, writes=False),
        Part("commands", module("commands", "--model", mixed), 150),
        Part("out_of_memory", module("out_of_memory", "--model", tiny), 120),
        Part("lost_context", module("lost_context", "--model", tiny), 120),
    ]
    if arguments.model and arguments.cpu_reference:
        compare = module("agreement", "--model", arguments.model, "--reference", arguments.cpu_reference)
        found.append(Part("agreement", compare, 120, alone=False))
    if arguments.reference:
        reference = [sys.executable, "benchmarks/gpu_reference_run.py", "--directory", arguments.reference]
        reference += ["--checkpoints", checkpoints]
        for allocator in ("malloc", "pool"):
            command = [*map(str, reference), "--allocator", allocator]
            found.append(Part(f"reference-{allocator}", command, 120))
    return [part for part in found if not arguments.only or part.name in arguments.only]


def run(part: Part, directory: Path) -> dict[str, Any]:
    out, log = directory / f"{part.name}.json", directory / f"{part.name}.log"
    command = [*part.command, "--out", str(out)] if part.writes else part.command
    begin = time.perf_counter()
    with log.open("w") as stream:
        try:
            code: int | str = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | part.environ,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=part.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {part.seconds} s"
        except OSError as error:
            code = f"{error}"
    text = log.read_text(errors="replace")
    result: dict[str, Any] = {"exit": code, "seconds": round(time.perf_counter() - begin, 1)}
    result["found"] = json.loads(out.read_text()) if out.exists() else None
    failed = list((result["found"] or {}).get("failed", []))
    if code != 0 or (part.writes and not (result["found"] or {}).get("finished")):
        failed.append(f"ended with {code}")
        result["log"] = text.splitlines()[-60:]
    elif not part.writes:
        result["log"] = text.splitlines()[-3:]
        result["summary"] = re.findall(
            r"^=+ (?:ERROR|RACECHECK) SUMMARY: .*$|^\d+ (?:passed|failed).*$", text, re.MULTILINE
        )
        if not result["summary"]:
            failed.append("nothing was checked")
    result["failed"] = failed
    print(f"{part.name}: {'; '.join(failed) or 'ok'} ({result['seconds']} s)", flush=True)
    return result


def device_description() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, default=ROOT.parent / "shared/checkpoints")
    parser.add_argument("--model", type=Path, help="a real model, for agreement and the ledger")
    parser.add_argument("--cpu-reference", type=Path, help="what agreement --make-reference wrote")
    parser.add_argument("--reference", type=Path, help="directory for the 27B-class checkpoint, kept there")
    parser.add_argument("--commit", help="where the checkout does not tell")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "commit": arguments.commit or commit(),
        "device": device_description(),
        "parts": {},
    }
    todo = parts(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)

        def note(part: Part) -> None:
            results["parts"][part.name] = run(part, directory)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")

        with ThreadPoolExecutor() as pool:
            list(pool.map(note, [part for part in todo if not part.alone]))
        for part in todo:
            if part.alone:
                note(part)
    if any(result["failed"] for result in results["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
