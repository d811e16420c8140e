"""Tokens a second on a GPU: a whole engine with sampling and text, against ceilings of the same run.

Makes synthetic checkpoints (random NVFP4 codes): 8B-class, 36 layers, hidden 4096, intermediate 12,288, 32
heads and 8 KV heads of 128, vocabulary 151,936, untied BF16 head, all linear layers NVFP4; with ``--large``
also the 27B-class one of ``gpu_reference_run.py``. The KV cache is FP8. Measured through `LLM`:

- ``ceilings``: what a copy on the device reaches
- ``decode``: 1, 8, 32, 128 and 256 sequences of 128 tokens in and 128 out, greedy, with kernels launched one
  by one and with steps as graphs; the part of a step in which the device is at work
- ``prefill``: 8 prompts of 4,096 tokens
- ``start-up``: from the command to its first byte, with and without compiled kernels in the cache
- ``allocations``: in 1,000 decode steps with requests that come and go, by the trace
- ``tracing``: tokens a second with ``--alloc-trace`` over without, in turn

Each part is a process of its own; ``gpu_speed.json`` has what was found when the next one begins.
``--small --device cpu`` tries it out anywhere.

    python benchmarks/gpu_speed.py [--large] [--only PART ...]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.results import commit  # noqa: E402
from benchmarks.gpu.synthetic import EIGHT_B, LARGE, SMALL, make_checkpoint  # noqa: E402
from engine.llm import LLM  # noqa: E402
from engine.memory.record import EventKind  # noqa: E402
from engine.memory.settings import TraceSettings  # noqa: E402
from engine.outputs import CompletionDelta  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402

BATCHES = (1, 8, 32, 128, 256)
PROMPT_TOKENS = OUTPUT_TOKENS = 128
PREFILL = (8, 4096)
"""prompts, tokens of each"""
PARTS = ("ceilings", "decode-eager", "decode-graphs", "prefill", "allocations", "tracing", "start-up")
TARGETS = {1: 600, 8: 4000, 32: 10_000, 128: 20_000, 256: 24_000}
"""tokens a second of the 8B-class model, by sequences"""


class Runs:
    """The parts on one checkpoint."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: str = arguments.device
        self.model: Path = arguments.worker_model
        self.batches = BATCHES[:2] if arguments.small else BATCHES
        self.prompts, self.prompt_tokens = (2, 256) if arguments.small else PREFILL
        self.steps = 50 if arguments.small else 1000

    def open(self, **flags: Any) -> LLM:
        """An engine whose whole cache is free for every measurement."""
        standard = {
            "kv_cache_dtype": "fp8",
            "max_model_len": 2 * self.prompt_tokens,
            "max_num_seqs": max(self.batches),
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
        }
        if self.device == "cpu":
            standard |= {"kv_cache_memory": 1 << 28, "max_num_batched_tokens": 512}
        return LLM(str(self.model), device=self.device, **(standard | flags))

    def ceilings(self) -> dict[str, Any]:
        if self.device == "cpu":
            return {}
        from benchmarks.gpu_kernels import Bench, copy_bandwidth, open_backend

        backend = open_backend()
        copy = copy_bandwidth(Bench(backend))
        backend.close()
        return {"copy_bytes_per_second": copy}

    def decode(self, *, eager: bool) -> dict[str, Any]:
        begin = time.perf_counter()
        found: dict[str, Any] = {}
        with self.open(enforce_eager=eager) as llm:
            seconds = time.perf_counter() - begin
            nbytes = sum(file.stat().st_size for file in self.model.glob("*.safetensors"))
            found["load"] = {"seconds": seconds, "bytes_per_second": nbytes / seconds}
            clock = StepClock(llm) if self.device == "cuda" else None
            generate(llm, 1, 32, 8)  # the first steps bring kernels to the device
            for batch in self.batches:
                generate(llm, batch, PROMPT_TOKENS, 8)  # and capture what is captured
                rounds = []
                for _ in range(3):
                    if clock is not None:
                        clock.start()
                    rounds.append(generate(llm, batch, PROMPT_TOKENS, OUTPUT_TOKENS))
                    if clock is not None:
                        rounds[-1] |= clock.stop()
                entry = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
                found[f"{batch} sequences"] = entry
                print(f"  {batch:4d} sequences: {entry}", flush=True)
            ledger = llm.house.ledger("after decode")
            found["ledger"] = ledger.entries()
        return found

    def prefill(self) -> dict[str, Any]:
        with self.open() as llm:
            generate(llm, self.prompts, self.prompt_tokens, 1)
            seconds = min(
                generate(llm, self.prompts, self.prompt_tokens, 1)["first_token_seconds"] for _ in range(3)
            )
            config = llm.engine.model_config
        tokens = self.prompts * self.prompt_tokens
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        linear = hidden * (query + 2 * key) + query * hidden + 3 * hidden * config.intermediate_size
        # Two products of query x visible tokens; half of them are visible under the causal mask.
        attention = 2 * self.prompt_tokens * query // 2
        operations = 2 * tokens * config.num_layers * (linear + attention)
        return {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "operations_per_second": operations / seconds,
        }

    def allocations(self) -> dict[str, Any]:
        trace = TraceSettings(trace=True, stats=True, records=1 << 14)
        rng = np.random.default_rng(0)
        with self.open(trace=trace, output=io.StringIO(), enforce_eager=False, max_num_seqs=32) as llm:
            generate(llm, 8, 32, 4)
            assert llm.house.recorder is not None
            with llm.house.recorder.reader() as reader:
                loaded, before = reader.newest, llm.engine.core._step
                prompts = [rng.integers(3, 1000, n).tolist() for n in rng.integers(4, 128, self.steps // 4)]
                params = [
                    SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True)
                    for n in rng.integers(8, 128, len(prompts))
                ]
                llm.generate(prompts, params)
                kinds = [event.kind for event in reader.read(loaded + 1).events()]
            count = sum(kind in (EventKind.ALLOC, EventKind.FREE) for kind in kinds)
            return {"steps": llm.engine.core._step - before, "allocations_and_frees": count}

    def tracing(self) -> dict[str, Any]:
        batch = self.batches[min(2, len(self.batches) - 1)]
        figures: dict[bool, list[float]] = {True: [], False: []}
        for on in (True, False, False, True):
            trace = TraceSettings(trace=on, stats=on)
            with self.open(trace=trace, output=io.StringIO()) as llm:
                generate(llm, batch, PROMPT_TOKENS, 8)
                figures[on] += [
                    generate(llm, batch, PROMPT_TOKENS, OUTPUT_TOKENS)["decode_tokens_per_second"]
                    for _ in range(3)
                ]
        traced, plain = statistics.median(figures[True]), statistics.median(figures[False])
        return {"sequences": batch, "traced": traced, "plain": plain, "ratio": traced / plain}

    def start_up(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "app.cli", "generate", "--model", str(self.model), "--stream"]
        command += ["--device", self.device, "--max-tokens", "2", "--prompt", "The capital", "--no-plan"]
        command += ["--max-model-len", "4096"]
        found = {}
        with tempfile.TemporaryDirectory() as cache:
            environ = os.environ | {"VTSERVE_CACHE": cache}
            for name in ("with an empty cache", "with compiled kernels"):
                begin = time.perf_counter()
                with subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, bufsize=0
                ) as run:
                    assert run.stdout is not None
                    first = run.stdout.read(1)
                    found[name] = time.perf_counter() - begin
                    run.stdout.read()
                if run.returncode or not first:
                    raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
        return {"seconds_to_the_first_byte": found}

    def part(self, name: str) -> dict[str, Any]:
        match name:
            case "decode-eager":
                return self.decode(eager=True)
            case "decode-graphs":
                return self.decode(eager=False)
            case "start-up":
                return self.start_up()
        method: Any = getattr(self, name)
        found: dict[str, Any] = method()
        return found


def generate(llm: LLM, batch: int, prompt_tokens: int, tokens: int) -> dict[str, float]:
    """Seconds until every sequence has its first token; tokens a second of all others, and overall."""
    rng = np.random.default_rng(prompt_tokens)
    prompts = rng.integers(3, min(1000, llm.limits.vocab_size), (batch, prompt_tokens)).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    first: dict[int, float] = {}

    def arrived(index: int, delta: CompletionDelta) -> None:
        first.setdefault(index, time.perf_counter())

    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, on_delta=arrived)
    end = time.perf_counter()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * batch
    started = max(first.values())
    return {
        "first_token_seconds": started - begin,
        "decode_tokens_per_second": batch * (tokens - 1) / (end - started) if tokens > 1 else 0.0,
        "output_tokens_per_second": batch * tokens / (end - begin),
    }


class StepClock:
    """Tells how long the device has nothing to do between two steps, by events in its stream.

    A step's work begins when its inputs are sent, and ends when its tokens are copied.
    """

    def __init__(self, llm: LLM) -> None:
        runner: Any = llm.engine.core._runner
        self._backend, self._device = runner._backend, runner._backend.device
        self._prepare, self._synchronize = self._backend.prepare, self._device.synchronize
        self._begins: list[Any] = []
        self._ends: list[Any] = []

    def start(self) -> None:
        self._begins.clear()
        self._ends.clear()
        self._backend.prepare, self._device.synchronize = self._timed_prepare, self._timed_synchronize

    def stop(self) -> dict[str, float]:
        """Milliseconds at the median, without the first steps, which compute the prompts."""
        self._backend.prepare, self._device.synchronize = self._prepare, self._synchronize
        self._synchronize()
        steps = list(zip(self._begins, self._ends, strict=True))
        steps = steps[len(steps) // 4 :]
        step = statistics.median(end - begin for begin, end in steps)
        gap = statistics.median(after[0] - before[1] for before, after in itertools.pairwise(steps))
        return {"step_ms": step, "gap_ms": gap, "gap_of_step": gap / (step + gap)}

    def _timed_prepare(self, batch: Any) -> Any:
        self._begins.append(self._event())
        return self._prepare(batch)

    def _timed_synchronize(self) -> None:
        if len(self._ends) < len(self._begins):  # the wait for the step's tokens, not a graph's capture
            self._ends.append(self._event())
        self._synchronize()

    def _event(self) -> Any:
        from cuda.core import EventOptions

        return self._device.stream.record(options=EventOptions(timing_enabled=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, default=ROOT.parent / "shared/checkpoints")
    parser.add_argument("--directory", type=Path, help="where checkpoints are made; kept if given")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--large", action="store_true", help="the 27B-class model too")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script out")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--seconds", type=int, default=180, help="that a part may take")
    parser.add_argument("--commit", help="where the checkout does not tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_speed.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(Runs(arguments).part(arguments.worker)))
        return
    results: dict[str, Any] = {"commit": arguments.commit or commit(), "targets": TARGETS, "failed": []}
    models = {"small": SMALL} if arguments.small else {"8B": EIGHT_B}
    if arguments.large:
        models["27B"] = LARGE
    with tempfile.TemporaryDirectory() as temporary:
        for name, shape in models.items():
            model = (arguments.directory or Path(temporary)) / f"synthetic-{name}"
            if not (model / "model.safetensors").exists():
                tokenizer = arguments.checkpoints / "llama-mixed/MIXED-modelopt"
                make_checkpoint(model, shape, tokenizer, nvfp4_attention=shape is not LARGE)
            results[name] = {"shape": shape}
            for part in arguments.only or PARTS:
                print(f"{name}: {part}", flush=True)
                results[name][part] = run_part(part, model, arguments, results["failed"])
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print("failed:", *(results["failed"] or ["nothing"]), sep="\n  ")
    raise SystemExit(bool(results["failed"]))


def run_part(part: str, model: Path, arguments: argparse.Namespace, failed: list[str]) -> Any:
    """What a worker found; None, and a line in `failed`, if it died or took too long."""
    command = [sys.executable, __file__, "--worker", part, "--worker-model", str(model)]
    command += ["--device", arguments.device, *(["--small"] if arguments.small else [])]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=arguments.seconds, check=True
        )
    except subprocess.SubprocessError as error:
        failed.append(f"{part}: {error}")
        return None
    *lines, found = done.stdout.splitlines()
    print(*lines, found, sep="\n")
    return json.loads(found)


if __name__ == "__main__":
    main()
