"""Greedy tokens of the CPU and the CUDA backend, on one model with 64 prompts.

The CPU backend computes in float32, the CUDA backend keeps activations in bfloat16. What that alone does to
the lead of a token over another is measured on the reference's side: a float64 forward pass that rounds
activations to bfloat16 reads the CPU's tokens, and the change of the leads is the noise. Where the backends
part and the CPU's lead was less than `SIGMAS` times that noise, it is a near-tie. All are listed; the
prompt then goes on from the CPU's token, so that each is compared to its end.

``--make-reference`` runs the CPU's side alone and writes what the other machine compares with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.results import Results
from engine.backend.protocol import DType
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.model.transformer import KVScales, Rounding, Transformer, e4m3_rounding, to_bfloat16

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, TOKENS = 64, 32
LENGTHS = (8, 40, 90, 200)
"""prompt tokens, in turn"""
SIGMAS = 5.0
"""Among 2048 tokens the largest of normal noise is 3.5; this noise has longer tails."""
TOP = 8
CACHES = ("fp8", "bfloat16")


def prompts(llm: LLM) -> list[list[int]]:
    """Pieces of a text, each from another place."""
    tokens = llm.tokenizer.encode((ROOT / "app/data/calibration.txt").read_text())
    step = (len(tokens) - max(LENGTHS)) // PROMPTS
    return [tokens[i * step : i * step + LENGTHS[i % len(LENGTHS)]] for i in range(PROMPTS)]


def greedy(tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


def make_reference(model: Path) -> dict[str, Any]:
    return {cache: cpu_side(model, cache) for cache in CACHES}


def cpu_side(model: Path, cache: str) -> dict[str, Any]:
    with LLM(
        model=str(model), device="cpu", kv_cache_dtype=cache, kv_cache_memory=1 << 28, max_model_len=512
    ) as llm:
        asked = prompts(llm)
        outputs = [output.outputs[0] for output in llm.generate(asked, greedy(TOKENS, TOP))]
    tokens = [output.token_ids for output in outputs]
    top = [
        [
            {entry.token_id: round(entry.logprob, 5) for entry in position.top}
            for position in output.logprobs or ()
        ]
        for output in outputs
    ]
    return {
        "prompts": asked,
        "tokens": tokens,
        "top": top,
        "rounding": rounding(model, cache, asked, tokens, top),
    }


class FlatRope(Transformer):
    """A checkpoint whose configuration spells ``rope_theta`` the old way."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if "rope_parameters" not in self.config:
            self.config["rope_parameters"] = {"rope_theta": self.config["rope_theta"], "rope_type": "default"}


def bfloat16_cache(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return to_bfloat16(key), to_bfloat16(value)


def rounding(
    model: Path,
    cache: str,
    asked: Sequence[list[int]],
    tokens: Sequence[list[int]],
    top: Sequence[Sequence[dict[int, float]]],
) -> dict[str, Any]:
    """What rounding activations to bfloat16 does to leads: the CPU's first token over its second."""
    transformer = FlatRope(model)
    scales = [transformer.kv_scales(layer) or KVScales(1.0, 1.0) for layer in range(transformer.num_layers)]
    stored: Rounding = e4m3_rounding(scales) if cache == "fp8" else bfloat16_cache
    changes, parted = [], []
    for prompt, chosen, leaders in zip(asked, tokens, top, strict=True):
        logits = transformer.run(prompt + chosen[:-1], stored, to_bfloat16).logits[len(prompt) - 1 :]
        for row, token, near in zip(logits, chosen, leaders, strict=True):
            second = max((other for other in near if other != token), key=lambda other: near[other])
            changes.append(row[token] - row[second] - (near[token] - near[second]))
            best = int(row.argmax())
            if best != token:
                parted.append(near[token] - near[best] if best in near else None)
    known = [lead for lead in parted if lead is not None]
    return {
        "lead_noise_rms": float(np.sqrt(np.mean(np.square(changes)))),
        "lead_noise_largest": float(np.abs(changes).max()),
        "tokens_that_part": len(parted),
        "largest_lead": max(known, default=0.0),
    }


def compare(llm: LLM, reference: dict[str, Any]) -> dict[str, Any]:
    """Run all prompts, and those that part again from the CPU's token on, until all are compared."""
    expected = reference["tokens"]
    near_tie = SIGMAS * reference["rounding"]["lead_noise_rms"]
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
    leads = [entry["cpu_lead"] for entry in parted if entry["cpu_lead"] is not None]
    return {
        "prompts": len(expected),
        "tokens": sum(map(len, expected)),
        "same": compared,
        "prompts_that_part": first_round,
        "tokens_that_part": len(parted),
        "largest_lead": max(leads, default=0.0),
        "near_tie": near_tie,
        "bfloat16_rounding_alone": reference["rounding"],
        "parted": parted,
        "beyond_near_ties": [
            entry for entry in parted if entry["cpu_lead"] is None or entry["cpu_lead"] > near_tie
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
    for cache in CACHES:
        for allocator in ("malloc", "pool"):
            begin = time.perf_counter()
            with LLM(
                model=str(arguments.model),
                device=arguments.device,
                cuda_allocator=allocator,
                kv_cache_dtype=cache,
                kv_cache_memory=1 << 28,
                max_model_len=512,
            ) as llm:
                assert llm.engine.kv_dtype is (DType.FLOAT8_E4M3 if cache == "fp8" else DType.BFLOAT16)
                loaded = time.perf_counter()
                found = compare(llm, reference[cache])
            name = f"{cache}, {allocator}"
            seconds = {"load_seconds": loaded - begin, "seconds": time.perf_counter() - loaded}
            results.put(name, seconds | found)
            results.check(not found["beyond_near_ties"], f"{name}: tokens differ where the CPU was sure")
    results.finish()


if __name__ == "__main__":
    main()
