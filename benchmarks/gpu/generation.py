"""A short generation on the device, for tools that watch a process: prompts of several lengths, greedy and
sampled.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.llm import LLM
from engine.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4)
    arguments = parser.parse_args()
    for model in arguments.models:
        for dtype in ("fp8", "bfloat16"):
            with LLM(
                model=str(model),
                device=arguments.device,
                kv_cache_dtype=dtype,
                kv_cache_memory=1 << 24,
                max_model_len=256,
            ) as llm:
                prompts = [[1 + (7 * i + 3 * n) % 400 for i in range(n)] for n in (1, 5, 33, 120)]
                sampled = SamplingParams(
                    temperature=0.9, top_p=0.9, top_k=50, seed=3, max_tokens=arguments.tokens
                )
                greedy = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
                outputs = llm.generate(prompts, [greedy, sampled, greedy, sampled])
                print(model.name, dtype, [output.outputs[0].token_ids for output in outputs], flush=True)


if __name__ == "__main__":
    main()
