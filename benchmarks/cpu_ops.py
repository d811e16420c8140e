"""Where a step's time goes on the CPU backend, with SmolLM2-135M's shapes and random weights.

Claim: at batch 1 everything but the linear layers and attention takes less than 1 ms a step, Python included;
attention takes less than a tenth of a 512-token prefill. Prints a table and writes
benchmarks/results/cpu_ops.json.

The model's own forward pass runs over a backend that reads the clock around every operation. Cases take
turns, round by round; figures are medians.

    python benchmarks/cpu_ops.py [--rounds 20] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend.cpu import CpuBackend
from engine.backend.protocol import (
    DType,
    KVLayer,
    Linear,
    LinearSource,
    StepBatch,
    StepLimits,
    Tensor,
    WeightFormat,
)
from engine.memory.resources import HostMemoryResource
from engine.model.config import ModelConfig, RopeConfig
from engine.model.llama import Llama

RESULT = Path(__file__).parent / "results" / "cpu_ops.json"
BLOCK_SIZE = 16
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100_000.0),
    sliding_windows=(None,) * 30,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)
OPERATIONS = (
    "prepare",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "linear",
    "rope_and_store_kv",
    "attention",
    "silu_and_mul",
    "gather_rows",
)


@dataclass(frozen=True)
class Case:
    """`sequences` sequences with `queries` new tokens each after `past` tokens."""

    name: str
    sequences: int
    queries: int
    past: int


CASES = (
    Case("decode 1 after 128", 1, 1, 128),
    Case("decode 1 after 512", 1, 1, 512),
    Case("decode 1 after 4096", 1, 1, 4096),
    Case("decode 8 after 512", 8, 1, 512),
    Case("prefill 512", 1, 512, 0),
    Case("prefill 512 after 3584", 1, 512, 3584),
)
LIMITS = StepLimits(
    max_tokens=512,
    max_seqs=8,
    max_blocks_per_seq=4224 // BLOCK_SIZE,
    max_logits_rows=8,
    vocab_size=CONFIG.vocab_size,
    block_size=BLOCK_SIZE,
)


class RandomWeights:
    """Stands in for the weight loader: NVFP4 layers, a bfloat16 embedding that is the head too."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self._rng = np.random.default_rng(0)

    def has_linear(self, module: str) -> bool:
        return module != "lm_head"

    def linear(self, name: str, modules: Sequence[str], rows: Sequence[int], columns: int) -> Linear:
        return self._backend.load_linear([self._source(name, n, columns) for n in rows])

    def _source(self, name: str, rows: int, columns: int) -> LinearSource:
        shape = (rows, columns)
        if name == "model.embed_tokens":
            # Positive bfloat16 from 2^-7 to 2^-5: any bytes would be a number, these give sensible logits.
            weight = self._rng.integers(0x3C00, 0x3D00, shape, np.uint16)
            return LinearSource(name, WeightFormat.BF16, shape, weight)
        codes = self._rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = self._rng.integers(0x28, 0x40, (rows, columns // 16), np.uint8)
        return LinearSource(name, WeightFormat.NVFP4, shape, codes, scales, 0.02)

    def vector(self, name: str, length: int) -> Tensor:
        return self._backend.from_host(np.ones(length, np.float32), DType.FLOAT32)

    def tied_table(self, module: str, shape: tuple[int, int]) -> Linear:
        return self.linear(module, [module], [shape[0]], shape[1])

    def constant(self, name: str, array: np.ndarray) -> Tensor:
        return self._backend.from_host(array, DType.FLOAT32)

    def finish(self) -> None:
        """Nothing is left."""


class ClockedBackend:
    """A backend that adds up the time in each operation."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for name in OPERATIONS:
            setattr(self, name, self._clocked(name, getattr(backend, name)))

    def _clocked(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self.seconds

        def clocked(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = operation(*arguments, **keywords)
            seconds[name] += time.perf_counter() - begin
            return result

        return clocked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def make_batch(case: Case, num_blocks: int) -> StepBatch:
    """The case's step; its sequences share the cache's blocks, whose content does not matter."""
    rng = np.random.default_rng(0)
    length, tokens = case.past + case.queries, case.sequences * case.queries
    tables = rng.integers(0, num_blocks, (case.sequences, LIMITS.max_blocks_per_seq)).astype(np.int32)
    positions = np.tile(np.arange(case.past, length, dtype=np.int32), case.sequences)
    sequence = np.repeat(np.arange(case.sequences), case.queries)
    slots = tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(0, tokens + 1, case.queries, dtype=np.int32)
    return StepBatch(
        token_ids=rng.integers(0, CONFIG.vocab_size, tokens).astype(np.int32),
        positions=positions,
        slot_mapping=slots,
        query_start=starts,
        seq_lens=np.full(case.sequences, length, np.int32),
        block_tables=tables,
        logits_rows=starts[1:] - 1,
    )


def make_cache(backend: CpuBackend, num_blocks: int) -> list[KVLayer]:
    shape = (num_blocks, BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)
    codes = np.random.default_rng(0).integers(0, 0x7E, shape, np.uint8)
    return [
        KVLayer(
            backend.from_host(codes, DType.FLOAT8_E4M3),
            backend.from_host(codes, DType.FLOAT8_E4M3),
            0.01,
            0.01,
        )
        for _ in range(CONFIG.num_layers)
    ]


def measure(cases: Sequence[Case], rounds: int, threads: int | None) -> dict[str, dict[str, float]]:
    """Milliseconds a step, by case: of each operation, of the model's Python, and in all."""
    plain = CpuBackend(HostMemoryResource(4 << 30), threads=threads)
    backend: Any = ClockedBackend(plain)
    weights: Any = RandomWeights(plain)
    model = Llama(CONFIG, weights, backend)
    model.reserve(LIMITS)
    plain.reserve(LIMITS)
    num_blocks = LIMITS.max_blocks_per_seq
    kv = make_cache(plain, num_blocks)
    samples: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for round_ in range(rounds + 1):
        for case in cases:
            batch = make_batch(case, num_blocks)
            backend.seconds.clear()
            begin = time.perf_counter()
            model.forward(backend.prepare(batch), kv)
            total = time.perf_counter() - begin
            if round_ == 0:
                continue  # kernels are compiled, memory is touched
            row = {name: 1000 * backend.seconds[name] for name in OPERATIONS}
            row["python"] = 1000 * total - sum(row.values())
            row["total"] = 1000 * total
            samples[case.name].append(row)
    plain.close()
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    results = measure(CASES, options.rounds, options.threads)

    columns = [*OPERATIONS, "python", "total"]
    print(f"ms a step, medians of {options.rounds} rounds")
    print(f"{'':24}" + "".join(f"{case.name:>24}" for case in CASES))
    for column in columns:
        rows = [results[case.name] for case in CASES]
        cells = [f"{row[column]:14.3f}{row[column] / row['total']:9.1%} " for row in rows]
        print(f"{column:24}" + "".join(cells))

    decode, prefill = results["decode 1 after 512"], results["prefill 512"]
    rest = decode["total"] - decode["linear"] - decode["attention"]
    share = prefill["attention"] / prefill["total"]
    print(f"all but linear and attention at batch 1: {rest:.2f} ms   target < 1: {verdict(rest < 1)}")
    print(f"attention's share of a 512-token prefill: {share:.1%}   target < 10%: {verdict(share < 0.1)}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "threads": options.threads,
                "rounds": options.rounds,
                "milliseconds": results,
            },
            indent=1,
        )
        + "\n"
    )


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
