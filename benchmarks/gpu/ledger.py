"""The ledger of one engine on the device: after load, after the first forward, and after more of them.

With ``--observe`` CUPTI looks on: the engine must ask for nothing past its allocator but what loading kernels
brings.

One process a run, so that the context is made, and measured, once.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from benchmarks.gpu.results import Results
from engine.llm import LLM
from engine.memory.ledger import Ledger
from engine.memory.settings import TraceSettings
from engine.sampling_params import SamplingParams

RESIDUAL = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--allocator", default="malloc")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache-memory", type=int, default=1 << 30)
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = Results(arguments.out)
    lines = io.StringIO()
    with LLM(
        model=str(arguments.model),
        device=arguments.device,
        cuda_allocator=arguments.allocator,
        kv_cache_memory=arguments.kv_cache_memory,
        max_model_len=512,
        trace=TraceSettings(trace=True, stats=True, observe=arguments.observe),
        output=lines,
    ) as llm:
        house = llm.house
        assert house.statistics is not None

        def take(moment: str) -> None:
            # A free of memory's own reading: nothing may be queued.
            ledger: Ledger = house.ledger(moment)
            print(ledger.render(), flush=True)
            results.put(moment, ledger.to_dict() | {"tags": None, "entries": ledger.entries()})
            results.check(abs(ledger.residual) <= RESIDUAL, f"{moment}: residual of {ledger.residual} bytes")

        take("after load")
        allocations = house.statistics.statistics().to_dict()
        llm.generate("The first forward", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        take("after the first forward")
        prompts = [[1 + (i * 37 + j) % 400 for j in range(300)] for i in range(16)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        llm.generate(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True))
        take("after more forwards")
        now = house.statistics.statistics().to_dict()
        results.check(now == allocations, "steps asked for memory")
        results.put("statistics", now["total"])
        bypasses = [line for line in house.last_lines(1 << 16) if "BYPASS" in line]
    results.put("bypasses", {"count": len(bypasses), "first": bypasses[:20]})
    results.check(not arguments.observe or bool(bypasses), "nothing was observed: modules have variables")
    results.check(
        all("step=library" in line for line in bypasses), "the engine asked for memory past its allocator"
    )
    results.put("graph capture", "the engine captures no graphs: nothing to measure")
    results.put("live_after_close", house.tracing.live if house.tracing else None)
    results.check(results.found["live_after_close"] == 0, "bytes were not given back")
    results.put("lines", lines.getvalue().splitlines()[-40:])
    results.finish()


if __name__ == "__main__":
    main()
