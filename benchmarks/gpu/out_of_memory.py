"""Failures of the real driver, and what the memory resources say of them.

Full cards, caps, a fragmented pool, a neighbour process, an engine that does not fit; after each the device
must be usable, and the next kernel must not be blamed.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results
from engine.errors import EngineDeadError
from engine.failure_record import read_failure
from engine.llm import LLM
from engine.memory.adaptors import LimitingMemoryResource
from engine.memory.cuda.device import CudaDeviceAccount, NvmlUsage
from engine.memory.cuda.resources import CudaMallocMemoryResource, CudaPoolMemoryResource
from engine.memory.cuda.runtime import BoundCudaRuntime
from engine.memory.errors import OutOfMemoryError, Why
from engine.memory.settings import TraceSettings
from engine.sampling_params import SamplingParams

MIB, GIB = 1 << 20, 1 << 30
NEIGHBOUR = """
import sys
from engine.memory.cuda.runtime import BoundCudaRuntime
runtime = BoundCudaRuntime()
free, _ = runtime.memory_info()
runtime.malloc(free - (20 << 30))
print("holding", flush=True)
sys.stdin.read()
"""


class Scene:
    """Resources of both kinds over one account, and a way to see that the device still works."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.runtime = BoundCudaRuntime()
        self.account = CudaDeviceAccount(self.runtime, NvmlUsage())
        results.put("device", {"total": self.account.total, "context": self.account.context})

    def memory(self, kind: str, **options: Any) -> Any:
        resource = CudaMallocMemoryResource if kind == "malloc" else CudaPoolMemoryResource
        return resource(self.account, self.runtime, **options)

    def refused(self, name: str, memory: Any, size: int, why: Why) -> None:
        """`size` must be refused as `why`, quickly enough, and leave nothing behind."""
        begin = time.perf_counter()
        try:
            memory.acquire(size, None)
        except OutOfMemoryError as error:
            entry = error.request.to_dict() | {
                "text": str(error),
                "seconds": time.perf_counter() - begin,
                "last_error_after": self.runtime.clear_last_error(),
            }
            if hasattr(memory, "last_retries"):
                entry["retries"] = memory.last_retries()
            if hasattr(memory, "read_pool"):
                entry["pool_after"] = memory.read_pool()
            self.results.put(name, entry)
            self.results.check(error.why is why, f"{name}: {error.why.value}, not {why.value}")
            self.results.check(entry["last_error_after"] == 0, f"{name}: the next kernel would be blamed")
        except Exception as error:
            self.results.check(False, f"{name}: {type(error).__name__}: {error}")
        else:
            self.results.check(False, f"{name}: was not refused")
        self.works(name, memory)

    def works(self, name: str, memory: Any) -> None:
        """A small block can be had, written and given back."""
        from cuda.bindings import runtime

        try:
            ptr = memory.acquire(MIB, None)
            (status,) = runtime.cudaMemset(ptr, 1, MIB)
            memory.release(ptr, MIB, None)
            self.runtime.synchronize()
            self.results.check(int(status) == 0, f"{name}: the block cannot be written ({status})")
        except Exception as error:
            self.results.check(False, f"{name}: the device is not usable after: {error}")


def fill(memory: Any, leave: int, piece: int = GIB) -> list[tuple[int, int]]:
    """Take pieces until no more than `leave` and a piece are free."""
    taken = []
    while memory.read_free() + slack(memory) > leave + piece:
        taken.append((memory.acquire(piece, None), piece))
    return taken


def slack(memory: Any) -> int:
    pool = memory.read_pool()
    return 0 if pool is None else int(pool[1] - pool[0])


def give_back(memory: Any, taken: list[tuple[int, int]]) -> None:
    for ptr, size in taken:
        memory.release(ptr, size, None)
    taken.clear()


def full_card(scene: Scene, kind: str) -> None:
    memory = scene.memory(kind)
    taken = fill(memory, 2 * GIB)
    name = f"{kind}: full card"
    scene.refused(name, memory, 6 * GIB, Why.FULL)
    overheads, free = memory.overheads(), memory.read_free()
    residual = memory.total - free - memory.live - overheads.total
    scene.results.put(f"{name}: residual", residual)
    scene.results.check(abs(residual) <= 64 * MIB, f"{name}: residual of {residual} bytes")
    give_back(memory, taken[:8])
    del taken[:8]
    ptr = memory.acquire(6 * GIB, None)  # after the frees it fits
    memory.release(ptr, 6 * GIB, None)
    give_back(memory, taken)
    if kind == "pool":
        memory.close()


def caps(scene: Scene) -> None:
    for kind in ("malloc", "pool"):
        limiting = LimitingMemoryResource(scene.memory(kind), GIB)
        scene.refused(f"{kind}: limiting adaptor", limiting, 2 * GIB, Why.CAP)
    pool = scene.memory("pool", max_size=GIB)
    scene.refused("pool: its own cap", pool, 2 * GIB, Why.CAP)
    ptr = pool.acquire(900 * MIB, None)
    scene.refused("pool: its own cap, partly used", pool, 300 * MIB, Why.CAP)
    pool.release(ptr, 900 * MIB, None)
    pool.close()


def fragmented(scene: Scene) -> None:
    """Every other of blocks that fill the card is free: half the card, and no piece of it is large."""
    pool = scene.memory("pool")
    taken = fill(pool, GIB, 16 * MIB)
    kept = taken[::2]
    give_back(pool, taken[1::2])
    scene.runtime.synchronize()
    scene.results.put("pool: fragmented: before", {"free": pool.read_free(), "pool": pool.read_pool()})
    scene.refused("pool: fragmented", pool, 24 * GIB, Why.FRAGMENTATION)
    give_back(pool, kept)
    scene.runtime.synchronize()
    ptr = pool.acquire(24 * GIB, None)
    pool.release(ptr, 24 * GIB, None)
    pool.close()


def neighbour(scene: Scene) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        scene.results.check(child.stdout.readline().strip() == "holding", "neighbour: did not start")
        scene.results.put("neighbour: told", scene.account.other_processes())
        for kind in ("malloc", "pool"):
            memory = scene.memory(kind)
            scene.refused(f"{kind}: neighbour", memory, 40 * GIB, Why.NEIGHBOUR)
        child.communicate("")


def engine(scene: Scene, model: Path) -> None:
    """A KV cache beyond the card fails the load with record and levers; a smaller one then works, here."""
    for allocator in ("malloc", "pool"):
        name = f"{allocator}: engine"
        output = io.StringIO()
        flags: dict[str, Any] = {
            "model": str(model),
            "device": "cuda",
            "cuda_allocator": allocator,
            "max_model_len": 512,
            "trace": TraceSettings(trace=True),
            "output": output,
        }
        with tempfile.TemporaryDirectory() as records:
            try:
                with LLM(kv_cache_memory=scene.account.total * 2, failure_dir=records, **flags):
                    scene.results.check(False, f"{name}: was not refused")
            except EngineDeadError as error:
                record = read_failure(next(Path(records).glob("*.json")))
                scene.results.put(
                    name,
                    {
                        "cause": f"{type(error.__cause__).__name__}: {error.__cause__}",
                        "what": record.what,
                        "allocation": record.allocation,
                        "levers": [str(lever) for lever in record.levers],
                        "ledger": None
                        if record.ledger is None
                        else record.ledger | {"tags": len(record.ledger["tags"])},
                        "lines": [
                            line
                            for line in output.getvalue().splitlines()
                            if "FAILED" in line or "fatal" in line
                        ],
                    },
                )
                cause = error.__cause__
                is_full = isinstance(cause, OutOfMemoryError) and cause.why is Why.FULL
                scene.results.check(is_full, f"{name}: {cause!r}")
            except Exception as error:
                scene.results.check(False, f"{name}: {type(error).__name__}: {error}")
            free = scene.account.free()
            with LLM(kv_cache_memory=1 << 28, **flags) as llm:
                params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
                tokens = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
            scene.results.check(len(tokens) == 4, f"{name}: does not generate after the failure")
            scene.results.put(f"{name}: free before and after", [free, scene.account.free()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = Results(arguments.out)
    scene = Scene(results)
    acts: dict[str, Callable[[], None]] = {
        "full card by cudaMalloc": lambda: full_card(scene, "malloc"),
        "full card by a pool": lambda: full_card(scene, "pool"),
        "caps": lambda: caps(scene),
        "fragmented": lambda: fragmented(scene),
        "neighbour": lambda: neighbour(scene),
        "engine": lambda: engine(scene, arguments.model),
    }
    for name, act in acts.items():
        begin = time.perf_counter()
        try:
            act()
        except Exception as error:
            results.check(False, f"{name}: {type(error).__name__}: {error}")
        results.put(f"seconds: {name}", time.perf_counter() - begin)
    results.finish()


if __name__ == "__main__":
    main()
