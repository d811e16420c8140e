"""Greedy tokens of the CPU and the CUDA backend, on one model with 64 prompts.

Where they part, the CPU's log probabilities say by how much it preferred its own token: near-ties are listed, and
the prompt goes on from the CPU's token, so that each prompt is compared to its end.

``--make-reference`` runs the CPU's side alone and writes what the other machine compares with.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results
from engine.llm import LLM
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, TOKENS = 64, 32
LENGTHS = (8, 40, 90, 200)
"""prompt tokens, in turn"""
NEAR_TIE = 0.25
"""Leads of less, in logits, are within the rounding of activations to bfloat16 and of an FP8 cache."""
TOP = 8


def prompts(llm: LLM) -> list[list[int]]:
    """Pieces of a text, each from another place."""
    tokens = llm.tokenizer.encode((ROOT / "app/data/calibration.txt").read_text())
    step = (len(tokens) - max(LENGTHS)) // PROMPTS
    return [tokens[i * step : i * step + LENGTHS[i % len(LENGTHS)]] for i in range(PROMPTS)]


def greedy(tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


def make_reference(model: Path) -> dict[str, Any]:
    with LLM(model=str(model), device="cpu", kv_cache_memory=1 << 28, max_model_len=512) as llm:
        asked = prompts(llm)
        outputs = [output.outputs[0] for output in llm.generate(asked, greedy(TOKENS, TOP))]
    return {
        "prompts": asked,
        "tokens": [output.token_ids for output in outputs],
        "top": [
            [
                {entry.token_id: round(entry.logprob, 5) for entry in position.top}
                for position in output.logprobs or ()
            ]
            for output in outputs
        ],
    }


def compare(llm: LLM, reference: dict[str, Any]) -> dict[str, Any]:
    """Run all prompts, and those that part again from the CPU's token on, until all are compared."""
    expected = reference["tokens"]
    start = dict.fromkeys(range(len(expected)), 0)
    parted: list[dict[str, Any]] = []
    compared = 0
    first_round = None
    while start:
        asked = [reference["prompts"][i] + expected[i][:at] for i, at in start.items()]
        outputs = llm.generate(asked, [greedy(TOKENS - at) for at in start.values()])
        following = {}
        for (i, at), output in zip(start.items(), outputs, strict=True):
            found = output.outputs[0].token_ids
            rest = expected[i][at:]
            same = next((k for k, (a, b) in enumerate(zip(found, rest, strict=True)) if a != b), len(rest))
            compared += same
            if same < len(rest):
                top = {int(token): value for token, value in reference["top"][i][at + same].items()}
                lead = top[rest[same]] - top[found[same]] if found[same] in top else None
                parted.append(
                    {"prompt": i, "at": at + same, "cpu": rest[same], "cuda": found[same], "cpu_lead": lead}
                )
                if at + same + 1 < len(expected[i]):
                    following[i] = at + same + 1
        first_round = len(parted) if first_round is None else first_round
        start = following
    total = sum(map(len, expected))
    leads = [abs(entry["cpu_lead"]) for entry in parted if entry["cpu_lead"] is not None]
    return {
        "prompts": len(expected),
        "tokens": total,
        "same": compared,
        "prompts_that_part": first_round,
        "parted": parted,
        "largest_lead": max(leads, default=0.0),
        "beyond_near_ties": [
            entry for entry in parted if entry["cpu_lead"] is None or entry["cpu_lead"] > NEAR_TIE
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--make-reference", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.make_reference:
        arguments.reference.write_text(json.dumps(make_reference(arguments.model)))
        return
    results = Results(arguments.out)
    reference = json.loads(arguments.reference.read_text())
    for allocator in ("malloc", "pool"):
        begin = time.perf_counter()
        with LLM(
            model=str(arguments.model),
            device=arguments.device,
            cuda_allocator=allocator,
            kv_cache_memory=1 << 28,
            max_model_len=512,
        ) as llm:
            loaded = time.perf_counter()
            found = compare(llm, reference)
        results.put(
            allocator, {"load_seconds": loaded - begin, "seconds": time.perf_counter() - loaded, **found}
        )
        results.check(not found["beyond_near_ties"], f"{allocator}: tokens differ where the CPU was sure")
    results.finish()


if __name__ == "__main__":
    main()
