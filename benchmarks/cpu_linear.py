"""How fast linear layers are on the CPU, with SmolLM2-135M's shapes and random weights.

Claim: one token costs less than twice what reading the weights does; eight cost less than three times one; a
prompt's tokens are multiplied at three quarters of BLAS's speed with weights that are float32 already. Prints
a table and writes benchmarks/results/cpu_linear.json.

A step multiplies by every layer's weights and the head's, as a model does; each layer has its own copy, so
that they come from where a model's do. Steps of different sizes take turns, round by round, and each is run
once before it is timed. The ceilings are measured in the same rounds: reading as many bytes with all
threads, and NumPy's product (BLAS) of float32 matrices. Tokens a second are those of a model that is nothing
but its linear layers; each token has a row of logits, but only eight have one beyond that.

    python benchmarks/cpu_linear.py [--rounds 15] [--threads N] [--tokens 1,8,512]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np

from engine.backend.cpu import CpuBackend
from engine.backend.cpu.linear import CpuLinear
from engine.backend.protocol import LinearSource, WeightFormat
from engine.memory.resources import HostMemoryResource

RESULT = Path(__file__).parent / "results" / "cpu_linear.json"
LAYERS = 30
LOGITS_ROWS = 8
SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49_152, 576),
}
NVFP4 = ("qkv", "o", "gate_up", "down")
BLAS_FROM = 64
"""Tokens from which BLAS is measured too."""


@dataclass
class Case:
    """One product with every copy of a shape, or what it is compared with."""

    run: Callable[[], None]
    weight_bytes: int
    operations: int
    seconds: list[float]

    def figures(self) -> dict[str, float]:
        """Of the median round, and of the best one: other processes only ever add."""
        median, best = statistics.median(self.seconds), min(self.seconds)
        return {
            "milliseconds": median * 1e3,
            "best_milliseconds": best * 1e3,
            "gigabytes_per_second": self.weight_bytes / best / 1e9,
            "gigaflops": self.operations / best / 1e9,
        }


def load(backend: CpuBackend, name: str, rng: np.random.Generator) -> list[CpuLinear]:
    """Random weights of one shape: a copy for each layer in NVFP4, one lm_head in BF16."""
    rows, columns = SHAPES[name]
    if name == "lm_head":
        weight = rng.integers(0x3C00, 0x3D00, (rows, columns), dtype=np.uint16)
        sources = [LinearSource(name, WeightFormat.BF16, (rows, columns), weight)]
    else:
        sources = [
            LinearSource(
                name=name,
                format=WeightFormat.NVFP4,
                shape=(rows, columns),
                weight=rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
                group_scales=rng.integers(1, 0x7F, (rows, columns // 16), dtype=np.uint8),
                global_scale=1e-4,
            )
            for _ in range(LAYERS)
        ]
    linears = [backend.load_linear([source]) for source in sources]
    assert all(isinstance(linear, CpuLinear) for linear in linears)
    return linears  # type: ignore[return-value]


def product(linears: list[CpuLinear], tokens: int, threads: int) -> Case:
    rows, columns = linears[0].shape
    x, out = np.ones((tokens, columns), np.float32), np.empty((tokens, rows), np.float32)
    scratch = np.empty((threads, linears[0].scratch_size), np.float32)

    def run() -> None:
        for linear in linears:
            linear.apply(x, out, scratch)

    weight_bytes = sum(linear.nbytes for linear in linears)
    return Case(run, weight_bytes, 2 * tokens * rows * columns * len(linears), [])


def blas(name: str, tokens: int) -> Case:
    """NumPy's product with float32 weights, as often as there are layers."""
    rows, columns = SHAPES[name]
    copies = 1 if name == "lm_head" else LAYERS
    x, weight = np.ones((tokens, columns), np.float32), np.ones((rows, columns), np.float32)
    out = np.empty((tokens, rows), np.float32)

    def run() -> None:
        for _ in range(copies):
            np.matmul(x, weight.T, out=out)

    return Case(run, weight.nbytes * copies, 2 * tokens * rows * columns * copies, [])


@numba.njit(parallel=True)
def read(words: np.ndarray, sums: np.ndarray) -> None:
    """Sum `words` in as many parts as there are `sums`."""
    parts = sums.size
    for part in numba.prange(parts):
        total = np.uint64(0)
        for word in words[words.size * part // parts : words.size * (part + 1) // parts]:
            total += word
        sums[part] = total


def memory_read(size: int, threads: int) -> Case:
    words, sums = np.ones(size // 8, np.uint64), np.empty(threads, np.uint64)
    return Case(lambda: read(words, sums), words.nbytes, words.size, [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", default="1,2,4,8,16,64,512")
    options = parser.parse_args()
    counts = [int(count) for count in options.tokens.split(",")]

    backend = CpuBackend(HostMemoryResource(2 << 30), threads=options.threads)
    threads = backend.threads
    numba.set_num_threads(threads)
    rng = np.random.default_rng(0)
    linears = {name: load(backend, name, rng) for name in SHAPES}

    resident = sum(linear.nbytes for copies in linears.values() for linear in copies)
    steps = {
        tokens: {
            name: product(copies, min(tokens, LOGITS_ROWS) if name == "lm_head" else tokens, threads)
            for name, copies in linears.items()
        }
        for tokens in counts
    }
    ceilings = {
        tokens: {name: blas(name, tokens) for name in NVFP4} for tokens in counts if tokens >= BLAS_FROM
    }
    memory = {"memory": memory_read(resident, threads)}
    for _ in range(options.rounds):
        for group in (*steps.values(), *ceilings.values(), memory):
            for case in group.values():
                case.run()
            for case in group.values():
                start = time.perf_counter()
                case.run()
                case.seconds.append(time.perf_counter() - start)

    report = {
        "python": platform.python_version(),
        "numba": numba.__version__,
        "threading_layer": numba.threading_layer(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "blas_environment": {name: text for name, text in os.environ.items() if name.startswith("OPENBLAS")},
        "rounds": options.rounds,
        "weight_bytes": resident,
        "memory": memory["memory"].figures(),
        "blas": {
            tokens: {name: case.figures() for name, case in group.items()}
            for tokens, group in ceilings.items()
        },
        "steps": {tokens: summarise(tokens, step) for tokens, step in steps.items()},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)


def summarise(tokens: int, step: dict[str, Case]) -> dict[str, Any]:
    """Each product of a step, and all of them."""
    products = {name: case.figures() for name, case in step.items()}
    median = sum(figures["milliseconds"] for figures in products.values())
    best = sum(figures["best_milliseconds"] for figures in products.values())
    return {
        "milliseconds": median,
        "best_milliseconds": best,
        "tokens_per_second": tokens / median * 1e3,
        "best_tokens_per_second": tokens / best * 1e3,
        "products": products,
    }


def print_table(report: dict[str, Any]) -> None:
    print(f"{'tokens':>6} {'layer':>8} {'ms':>8} {'best ms':>8} {'GB/s':>6} {'GFLOP/s':>8} {'BLAS':>6}")
    for tokens, step in report["steps"].items():
        for name, figures in step["products"].items():
            beside = report["blas"].get(tokens, {}).get(name)
            print(
                f"{tokens:>6} {name:>8} {figures['milliseconds']:8.2f} {figures['best_milliseconds']:8.2f} "
                f"{figures['gigabytes_per_second']:6.1f} {figures['gigaflops']:8.0f} "
                + (f"{beside['gigaflops']:6.0f}" if beside else "")
            )
    for tokens, step in report["steps"].items():
        print(
            f"{tokens:>6} {'all':>8} {step['milliseconds']:8.2f} {step['best_milliseconds']:8.2f}   "
            f"{step['tokens_per_second']:.0f} tokens/s, best {step['best_tokens_per_second']:.0f}"
        )
    memory = report["memory"]
    print(
        f"reading {report['weight_bytes'] / 1e6:.0f} MB with {report['threads']} threads: "
        f"{memory['best_milliseconds']:.2f} ms at best, {memory['gigabytes_per_second']:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
