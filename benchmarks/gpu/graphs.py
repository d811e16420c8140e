"""Decode steps as CUDA graphs against the same steps kernel by kernel.

Of the same padded steps, never captured, every token and every log probability must be the same to the bit.
Of steps that are not padded, products and sequences are split otherwise: log probabilities may differ by a
rounding, and tokens part where two are nearly as likely, which is only counted. Sequences grow past a
bucket's length, and requests come and go.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.gpu.results import Results
from engine.llm import LLM
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

COUNTS = (1, 2, 4, 8, 3, 6, 9)
"""sequences; a bucket's size, and others"""
ROUNDING = 0.05
"""Most that a log probability may change by other splits."""
LONG = 1100
"""tokens; past the first bucket's length"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = Results(arguments.out)
    for model, dtype in itertools.product(arguments.models, ("fp8", "bfloat16")):
        name = f"{model.parent.name}/{model.name} {dtype}"
        eager, padded, graphs = (run(model, dtype, arguments, mode) for mode in ("eager", "padded", "graphs"))
        found = {"graphs": graphs["graphs"], "ledger": graphs["ledger"]}
        found["against the padded steps"] = compare(f"{name}, padded", padded, graphs, results, most=0.0)
        found["against kernel by kernel"] = compare(f"{name}, eager", eager, graphs, results, most=ROUNDING)
        results.put(name, found)
        if arguments.device == "cuda":
            results.check(graphs["graphs"] > 5, f"{name}: {graphs['graphs']} graphs were captured")
            results.check(eager["graphs"] == padded["graphs"] == 0, f"{name}: graphs where none should be")
            residual = abs(graphs["ledger"]["residual"])
            results.check(residual <= 64 << 20, f"{name}: residual of {residual} bytes")
    results.finish()


def run(model: Path, dtype: str, arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What every batch generates, greedily."""
    rng = np.random.default_rng(5)
    batches: dict[str, list[RequestOutput]] = {}
    with LLM(
        str(model),
        device=arguments.device,
        kv_cache_dtype=dtype,  # type: ignore[arg-type]
        kv_cache_memory=1 << 26,
        max_model_len=2048,
        max_num_seqs=12,
        enforce_eager=mode == "eager",
        enable_prefix_caching=False,
    ) as llm:
        backend: Any = llm.engine.core._runner._backend  # type: ignore[union-attr]
        if mode == "padded" and arguments.device == "cuda":
            backend._graphs._capture = lambda *_: None

        def generate(name: str, lengths: list[int], tokens: list[int]) -> None:
            vocabulary = min(400, llm.limits.vocab_size)
            prompts = [rng.integers(3, vocabulary, length).tolist() for length in lengths]
            greedy = SamplingParams(temperature=0, ignore_eos=True, logprobs=2)
            params = [msgspec.structs.replace(greedy, max_tokens=count) for count in tokens]
            batches[name] = llm.generate(prompts, params)

        for count in COUNTS:
            lengths = rng.integers(1, 60, count).tolist()
            generate(f"{count} sequences", lengths, [arguments.tokens] * count)
        generate("past a bucket's length", [1024 - arguments.tokens // 2] * 2, [arguments.tokens] * 2)
        generate("a long one", [LONG], [arguments.tokens])
        several = rng.integers(1, 200, 20).tolist()
        generate("come and go", several, rng.integers(1, arguments.tokens, 20).tolist())
        return {
            "batches": batches,
            "graphs": backend._graphs.count if arguments.device == "cuda" else 0,
            "ledger": llm.house.ledger("after graphs").entries(),
        }


def compare(
    name: str, one: dict[str, Any], other: dict[str, Any], results: Results, *, most: float
) -> dict[str, Any]:
    """`most`: that a log probability may differ before the tokens part; at 0 they may not part either."""
    found: dict[str, Any] = {}
    for batch, outputs in one["batches"].items():
        tokens = different = 0
        largest = 0.0
        for first, second in zip(outputs, other["batches"][batch], strict=True):
            a, b = first.outputs[0], second.outputs[0]
            tokens += len(a.token_ids)
            for place, (mine, its) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
                if mine != its:
                    different += len(a.token_ids) - place
                    break
                assert a.logprobs
                assert b.logprobs
                change = abs(a.logprobs[place].chosen.logprob - b.logprobs[place].chosen.logprob)
                largest = max(largest, change)
        found[batch] = {"tokens": tokens, "after they part": different, "largest_logprob_change": largest}
        results.check(largest <= most and (most or not different), f"{name}: {batch}: {found[batch]}")
    return found


if __name__ == "__main__":
    main()
