"""The commands as a person gives them, on a machine with a GPU: ``auto`` picks it, failures say what failed.

The server is killed once: the context of the dead engine goes with it, and the next one finds its memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu.results import Results
from benchmarks.server_process import Server

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def tail(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {
        "exit": done.returncode,
        "stdout": done.stdout.splitlines()[-10:],
        "stderr": done.stderr.splitlines()[-25:],
    }


def generate(model: Path, results: Results) -> None:
    common = ("generate", "--model", model, "--prompt", PROMPT, "--max-tokens", "8", "--alloc-trace")
    common += ("--alloc-trace-min-mib", "0", "--max-model-len", "512", "--kv-cache-memory", "16MiB")
    for allocator, api in (("malloc", ""), ("pool", " api=async ")):
        done = command(*common, "--cuda-allocator", allocator)
        name = f"generate, {allocator}"
        results.put(name, tail(done))
        results.check(done.returncode == 0 and bool(done.stdout.strip()), f"{name}: {done.returncode}")
        first = next((line for line in done.stderr.splitlines() if " #1 " in line), "")
        results.check(
            first.startswith("[cuda-alloc]") and api in first, f"{name}: auto does not pick the GPU"
        )
    if importlib.util.find_spec("cupti") is not None:
        done = command(*common, "--alloc-observe")
        bypasses = [line for line in done.stderr.splitlines() if " BYPASS " in line]
        results.put("generate, observed", tail(done) | {"bypasses": len(bypasses)})
        ours = all(line.endswith("step=library") for line in bypasses)
        results.check(
            done.returncode == 0 and bool(bypasses) and ours, f"generate, observed: {len(bypasses)} bypasses"
        )


def too_much(model: Path, results: Results) -> None:
    """More than the card has, really asked for."""
    for allocator in ("malloc", "pool"):
        with tempfile.TemporaryDirectory() as records:
            flags = ("--kv-cache-memory", "600GiB", "--cuda-allocator", allocator, "--alloc-trace")
            done = command(
                *("generate", "--model", model, "--prompt", PROMPT, *flags, "--failure-dir", records)
            )
            name = f"too much, {allocator}"
            files = list(Path(records).glob("*.json"))
            record = json.loads(files[0].read_text()) if files else {}
        entry = tail(done) | {"record": {key: record.get(key) for key in ("allocation", "levers", "ledger")}}
        results.put(name, entry)
        why = (record.get("allocation") or {}).get("why")
        failed = [line for line in entry["stderr"] if " FAILED " in line]
        results.check(done.returncode == 1, f"{name}: exit {done.returncode}")
        results.check(
            len(failed) == 1 and "why=full" in failed[0] and why == "full", f"{name}: {failed}, {why}"
        )
        results.check(
            any(line.startswith("engine-fatal:") for line in entry["stderr"]), f"{name}: no engine-fatal"
        )
        results.check(bool(record.get("levers")), f"{name}: no levers")


def perplexity(model: Path, results: Results) -> None:
    """The GPU's figure is the CPU's, but for the rounding of activations."""
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "text"
        text.write_text((ROOT / "app/data/calibration.txt").read_text()[:4000])
        flags = ("perplexity", "--model", model, "--file", text, "--window", "128", "--json")
        found = {device: command(*flags, "--device", device) for device in ("auto", "cpu")}
    results.put("perplexity", {device: tail(done) for device, done in found.items()})
    values = {
        device: json.loads(done.stdout)["nll_mean"] if done.returncode == 0 else None
        for device, done in found.items()
    }
    results.put("nll_means", values)
    gpu, cpu = values["auto"], values["cpu"]
    results.check(bool(gpu and cpu) and gpu != cpu and abs(gpu - cpu) < 0.05, f"perplexity: {values}")


def serve(model: Path, results: Results) -> None:
    with tempfile.TemporaryDirectory() as records:
        flags = ("--model", str(model), "--kv-cache-memory", "64MiB", "--max-model-len", "512")
        flags += ("--alloc-trace", "--failure-dir", records)
        with Server(*flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:

            def complete() -> str:
                body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": PROMPT}
                answer = http.post("/v1/completions", json=body | {"max_tokens": 8, "temperature": 0})
                return str(answer.json()["choices"][0]["text"]) if answer.is_success else answer.text

            entry: dict[str, Any] = {"completion": complete()}
            entry["ledger"] = http.get("/debug/alloc/ledger").json()
            entry["lines"] = http.get("/debug/alloc?last=5").text.splitlines()
            os.kill(server.engines()[0], signal.SIGKILL)
            time.sleep(0.2)
            server.wait_ready()
            entry["completion_after_a_kill"] = complete()
            entry["ledger_after_a_kill"] = http.get("/debug/alloc/ledger").json()
            entry["failures"] = http.get("/debug/alloc/failures").json()
            results.put("serve", entry)
    check = results.check
    check(entry["completion"] == entry["completion_after_a_kill"] != "", "serve: completions")
    check(any("[cuda-" in line for line in entry["lines"]), "serve: no lines of the GPU")
    free = [ledger["free"] for ledger in (entry["ledger"], entry["ledger_after_a_kill"])]
    check(abs(free[0] - free[1]) <= 64 << 20, f"serve: free before and after a kill: {free}")
    for ledger in (entry["ledger"], entry["ledger_after_a_kill"]):
        check(ledger["device"] == "cuda", "serve: the ledger is not the GPU's")
        check(abs(ledger["residual"]) <= 64 << 20, f"serve: residual of {ledger['residual']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = Results(arguments.out)
    for act in (generate, too_much, perplexity, serve):
        try:
            act(arguments.model, results)
        except (Exception, SystemExit) as error:
            results.check(False, f"{act.__name__}: {type(error).__name__}: {error}")
    results.finish()


if __name__ == "__main__":
    main()
