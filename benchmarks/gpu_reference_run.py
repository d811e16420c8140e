"""A 27B-class model under a limit of 24 GiB, and under one of 16 GiB, on a GPU.

Makes a synthetic checkpoint: 64 layers, hidden 5120, intermediate 17408, 40 heads and 8 KV heads of 128,
vocabulary 151,936, ModelOpt MIXED_PRECISION as recent checkpoints of that size are (NVFP4 MLP, FP8
attention, BF16 embedding and lm_head), random codes. Then, with tracing on and a KV cache of 1 GB in FP8:

- under ``LimitingMemoryResource`` at 24 GiB it must load and generate, and hold no more than what stays and
  one tensor at any time of the load;
- at 16 GiB it must fail with the request's line, a record, ``why=cap`` and levers that work, and give
  everything back; and with the first of the levers that is enough it must load.

Needs a CUDA device, 17 GB of disk and as much host memory. Writes ``gpu_reference_run.json`` and the
traces' tails. ``--small --device cpu`` tries it out anywhere.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.results import Results, commit  # noqa: E402
from benchmarks.gpu.synthetic import LARGE, SMALL, make_checkpoint  # noqa: E402
from engine.errors import EngineDeadError  # noqa: E402
from engine.failure_record import read_failure  # noqa: E402
from engine.llm import LLM  # noqa: E402
from engine.memory.adaptors import LimitingMemoryResource  # noqa: E402
from engine.memory.record import EventKind, EventState  # noqa: E402
from engine.memory.settings import TraceSettings  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402

GIB = 1 << 30
RESIDUAL = 64 << 20
TOKENIZER = Path("llama-mixed/MIXED-modelopt")


def device_memory(device: str, allocator: str) -> Any:
    if device == "cpu":
        from engine.memory.resources import HostMemoryResource

        return HostMemoryResource(64 * GIB)
    from engine.memory.cuda.opening import open_cuda_memory

    return open_cuda_memory(allocator)  # type: ignore[arg-type]


def load_peaks(house: Any) -> dict[str, Any]:
    """From the record: what was live at most while weights were loaded, over what was resident by then."""
    live: dict[int, tuple[str, int]] = {}
    weights = scratch = most_scratch = most_blocks = most_over = 0
    loading = True
    with house.recorder.reader() as reader:
        piece = reader.read()
        for event in piece.events():
            if event.state is not EventState.OK:
                continue
            segment = event.tag.partition("/")[0]
            if event.kind is EventKind.ALLOC:
                loading = loading and segment in ("weights", "repack")
                live[event.sequence] = (segment, event.size)
                sign = 1
            elif event.kind is EventKind.FREE:
                live.pop(event.sequence, None)
                sign = -1
            else:
                continue
            if not loading:
                break
            if segment == "repack":
                scratch += sign * event.size
            else:
                weights += sign * event.size
            blocks = sum(kind == "repack" for kind, _ in live.values()) if segment == "repack" else 0
            most_scratch, most_blocks = max(most_scratch, scratch), max(most_blocks, blocks)
            most_over = max(most_over, weights + scratch - weights)
        dropped = piece.dropped
    return {
        "weights": weights,
        "scratch_left": scratch,
        "largest_scratch": most_scratch,
        "most_scratch_blocks": most_blocks,
        "peak_over_resident": most_over,
        "records_dropped": dropped,
    }


class Run:
    """Loads under limits, all in one process and out of one resource."""

    def __init__(self, arguments: argparse.Namespace, model: Path, results: Results) -> None:
        self.arguments = arguments
        self.model = model
        self.results = results
        self.memory = device_memory(arguments.device, arguments.allocator)

    def load(self, limit: int, output: io.StringIO, records: Path, **flags: Any) -> LLM:
        return LLM(
            model=str(self.model),
            device=self.arguments.device,
            memory=LimitingMemoryResource(self.memory, limit),
            trace=TraceSettings(trace=True, stats=True, records=1 << 14),
            output=output,
            failure_dir=str(records),
            **({"kv_cache_memory": self.arguments.kv_cache_memory} | flags),
        )

    def that_fits(self, limit: int, name: str) -> None:
        output = io.StringIO()
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as records, self.load(limit, output, Path(records)) as llm:
            loaded = time.perf_counter()
            house = llm.house
            entry: dict[str, Any] = {
                "limit": limit,
                "load_seconds": loaded - begin,
                "kv_cache": {"bytes": llm.engine.kv_bytes, "dtype": llm.engine.kv_dtype.label},
                "live": house.tracing.live if house.tracing else None,
                "peak": house.tracing.peak if house.tracing else None,
                "largest_tensor": self.largest_tensor,
                "load": load_peaks(house),
                "ledgers": {"after load": house.ledger("after load").entries()},
            }
            self.results.put(name, entry)
            prompts = [[(7 * i + 11 * n) % 151_000 for i in range(n)] for n in (3, 64, 500, 1500)]
            params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            ledger = house.ledger("after the first forward")
            entry["ledgers"]["after the first forward"] = ledger.entries()
            entry["ledger_table"] = ledger.render().splitlines()
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params)
            entry["generate_seconds"] = time.perf_counter() - begin
            entry["token_ids"] = [output.outputs[0].token_ids for output in outputs]
            entry["errors"] = [output.error for output in outputs]
            begin = time.perf_counter()
            llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
            entry["one_sequence_tokens_per_second"] = 64 / (time.perf_counter() - begin)
            entry["allocations_while_generating"] = (
                0 if house.tracing is None else house.tracing.live - entry["live"]
            )
            entry["tail"] = output.getvalue().splitlines()[-40:]
            entry["first_lines"] = output.getvalue().splitlines()[:8]
            self.results.put(name, entry)
        entry["live_after_close"] = self.memory.live
        self.results.put(name, entry)
        check = self.results.check
        check(not any(entry["errors"]), f"{name}: {entry['errors']}")
        check(all(len(tokens) == 32 for tokens in entry["token_ids"]), f"{name}: tokens are missing")
        over = entry["load"]["peak_over_resident"]
        check(over <= self.largest_tensor, f"{name}: {over} bytes over what stays, while loading")
        check(entry["load"]["most_scratch_blocks"] <= 1, f"{name}: more than one scratch at once")
        check(entry["peak"] <= entry["live"] + self.largest_tensor, f"{name}: peak {entry['peak']}")
        check(
            entry["live_after_close"] == 0, f"{name}: {entry['live_after_close']} bytes were not given back"
        )
        for moment, entries in entry["ledgers"].items():
            residual = entries["residual"]
            check(abs(residual) <= RESIDUAL, f"{name}: {moment}: residual of {residual} bytes")

    def that_does_not_fit(self, limit: int, name: str) -> None:
        output = io.StringIO()
        entry: dict[str, Any] = {"limit": limit}
        with tempfile.TemporaryDirectory() as records:
            try:
                self.load(limit, output, Path(records)).close()
            except EngineDeadError as error:
                cause = error.__cause__
                record = read_failure(next(Path(records).glob("*.json")))
                entry |= {
                    "error": str(error),
                    "cause": f"{type(cause).__name__}: {cause}",
                    "what": record.what,
                    "allocation": record.allocation,
                    "levers": [
                        {"flag": str(lever), "frees": lever.frees, "enough": lever.enough}
                        for lever in record.levers
                    ],
                    "ledger": None if record.ledger is None else record.ledger["segments"],
                    "trace_lines": len(record.trace),
                    "tail": until_fatal(output.getvalue().splitlines()),
                    "live_after": self.memory.live,
                }
        self.results.put(name, entry)
        check = self.results.check
        if not check("allocation" in entry, f"{name}: it loads"):
            return
        allocation = entry["allocation"] or {}
        check(allocation.get("why") == "cap", f"{name}: {allocation.get('why')}")
        failed = [line for line in entry["tail"] if "FAILED" in line]
        check(len(failed) == 1 and "why=cap" in failed[0], f"{name}: {failed}")
        check(
            any(line.startswith("engine-fatal: loading") for line in entry["tail"]),
            f"{name}: no engine-fatal line",
        )
        check(bool(entry["levers"]), f"{name}: no levers")
        check(entry["live_after"] == 0, f"{name}: {entry['live_after']} bytes were not given back")
        self.try_levers(limit, name, entry)

    def try_levers(self, limit: int, name: str, entry: dict[str, Any]) -> None:
        """With a lever that is said to be enough, or with all where none is, it must load."""
        flags: dict[str, Any] = {}
        for lever in entry["levers"]:
            flag, _, value = lever["flag"].partition(" ")
            flags[flag.removeprefix("--").replace("-", "_")] = value
            if lever["enough"]:
                break
        from app.settings import parse_byte_size

        for key, value in flags.items():
            flags[key] = (
                parse_byte_size(value)
                if key.endswith("memory")
                else value
                if key.endswith("dtype")
                else int(value)
            )
        entry["tried"] = flags
        with tempfile.TemporaryDirectory() as records:
            try:
                with self.load(limit, io.StringIO(), Path(records), **flags) as llm:
                    tokens = llm.generate(
                        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
                    )
                    entry["with_levers"] = tokens[0].outputs[0].token_ids
            except EngineDeadError as error:
                entry["with_levers"] = f"{error.__cause__}"
        self.results.put(name, entry)
        if any(lever["enough"] for lever in entry["levers"]):
            self.results.check(isinstance(entry["with_levers"], list), f"{name}: {entry['with_levers']}")

    @property
    def largest_tensor(self) -> int:
        from engine.model.checkpoint import Checkpoint

        with Checkpoint.open(self.model) as checkpoint:
            return checkpoint.largest_tensor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, default=ROOT.parent / "shared/checkpoints")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made; kept if given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--allocator", default="malloc", choices=["malloc", "pool"])
    parser.add_argument("--kv-cache-memory", type=int, default=10**9)
    parser.add_argument("--limits", type=int, nargs=2, default=[24 * GIB, 16 * GIB], help="bytes")
    parser.add_argument("--commit", help="where the checkout does not tell")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_reference_run.json")
    arguments = parser.parse_args()
    results = Results(arguments.out)
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.directory or Path(temporary) / "synthetic-27b"
        shape = SMALL if arguments.small else LARGE
        begin = time.perf_counter()
        if not (model / "model.safetensors").exists():
            nbytes = make_checkpoint(model, shape, arguments.checkpoints / TOKENIZER)
            results.put(
                "checkpoint", {"bytes": nbytes, "seconds": time.perf_counter() - begin, "shape": shape}
            )
        results.put("commit", arguments.commit or commit())
        results.put("allocator", arguments.allocator)
        run = Run(arguments, model, results)
        for act, limit in (
            (run.that_fits, arguments.limits[0]),
            (run.that_does_not_fit, arguments.limits[1]),
        ):
            try:
                act(limit, f"{limit / GIB:.3g} GiB")
            except Exception as error:
                results.check(False, f"{limit / GIB:.3g} GiB: {type(error).__name__}: {error}")
    results.finish()
    print("failed:", *(results.found["failed"] or ["nothing"]), sep="\n  ")


def until_fatal(lines: list[str]) -> list[str]:
    """The last lines before the failure, and what is said of it; not the frees of the clearing up."""
    last = max((i for i, line in enumerate(lines) if line.startswith("engine-fatal")), default=len(lines) - 1)
    return lines[max(0, last - 30) : last + 4]


if __name__ == "__main__":
    main()
