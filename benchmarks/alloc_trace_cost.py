"""What watching an allocation costs on the CPU device.

Claim: tracing an allocation costs less than 5 µs at the median, with call site and tag, and statistics less
than 1 µs; with nothing on, nothing. Prints a table and writes benchmarks/results/alloc_trace_cost.json.

Each round measures every arm once, in a new order, over the same number of blocks; an arm's cost is the
median over the rounds of its time less the bare resource's in the same round, so that a change of the
machine's speed between rounds cancels out.

    python benchmarks/alloc_trace_cost.py [--rounds 400] [--blocks 250]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

from cuda.core import MemoryResource

from engine.memory.house import MemoryHouse
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings

RESULT = Path(__file__).parent / "results" / "alloc_trace_cost.json"
BLOCK_BYTES = 4096
TARGETS_US = {"tracing": 5.0, "tracing to a file": 5.0, "statistics": 1.0}


def measure(resource: MemoryResource, blocks: int) -> tuple[float, float]:
    """Microseconds an allocation and a free take."""
    held: list[object] = [None] * blocks
    with memory_scope("weights/model.layers.0.mlp.gate_proj"):
        start = time.perf_counter_ns()
        for place in range(blocks):
            held[place] = resource.allocate(BLOCK_BYTES)
        middle = time.perf_counter_ns()
        held.clear()
        end = time.perf_counter_ns()
    return (middle - start) / blocks / 1000, (end - middle) / blocks / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=250)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "nothing on": TraceSettings(),
            "statistics": TraceSettings(stats=True),
            "tracing": TraceSettings(trace=True),
            "tracing to a file": TraceSettings(trace=True, file=Path(folder) / "trace"),
            "tracing and statistics": TraceSettings(trace=True, stats=True),
        }
        bare = HostMemoryResource(64 << 30)
        houses = {
            name: MemoryHouse.build(HostMemoryResource(64 << 30), arm) for name, arm in settings.items()
        }
        arms: dict[str, MemoryResource] = {"bare": bare}
        arms.update((name, house.resource) for name, house in houses.items())
        for resource in arms.values():
            # Once around the ring: the steady state is what counts, not the first touch of its pages.
            for _ in range(65_536 // options.blocks // 2 + 1):
                measure(resource, options.blocks)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        order = list(arms)
        for _ in range(options.rounds):
            random.shuffle(order)
            for name in order:
                samples[name].append(measure(arms[name], options.blocks))
        for house in houses.values():
            house.close()

    rows = {}
    for name in arms:
        pairs = list(zip(samples[name], samples["bare"], strict=True))
        rows[name] = {
            "allocate_us": statistics.median(allocate for allocate, _ in samples[name]),
            "free_us": statistics.median(free for _, free in samples[name]),
            "allocate_cost_us": statistics.median(mine[0] - base[0] for mine, base in pairs),
            "free_cost_us": statistics.median(mine[1] - base[1] for mine, base in pairs),
        }
    print(f"µs, medians of {options.rounds} rounds")
    print(f"{'':24}{'allocate':>10}{'cost':>8}{'free':>10}{'cost':>8}")
    for name, row in rows.items():
        target = TARGETS_US.get(name)
        verdict = "" if target is None else f"   target < {target:g}: "
        if target is not None:
            verdict += "met" if row["allocate_cost_us"] < target else "MISSED"
        print(
            f"{name:24}{row['allocate_us']:10.2f}{row['allocate_cost_us']:8.2f}"
            f"{row['free_us']:10.2f}{row['free_cost_us']:8.2f}{verdict}"
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "rounds": options.rounds,
                "blocks_per_round": options.blocks,
                "block_bytes": BLOCK_BYTES,
                "targets_us": TARGETS_US,
                "arms": rows,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
