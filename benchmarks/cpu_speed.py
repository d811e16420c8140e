"""How fast the CPU backend is, beside llama.cpp on the same weights in Q4_1, and how much memory each takes.

Measured by turns in one run, so that a busy machine is busy for both: prefill of a 512-token prompt, greedy
decoding of 128 tokens at batch 1 (and, for vtserve, batch 8), the peak resident set of each process, and the
time from vtserve's start-up to its first token with warm caches. Both use the same number of threads. Prints
a table and writes ``benchmarks/results/cpu_speed.json``.

llama.cpp comes from ``llama-cpp-python`` in an environment of its own; it is no dependency of this project::

    python3 -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python    # compiles, some minutes
    python benchmarks/cpu_speed.py --llama-python /tmp/llama/bin/python --gguf SmolLM2-135M-Instruct.Q4_1.gguf

The GGUF is the one that the demo model is made of. Without ``--llama-python`` only vtserve is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

PREFILL_TOKENS = 512
DECODE_PROMPT_TOKENS = 16
DECODE_TOKENS = 128
BATCH = 8
CONTEXT = 1024
RESULTS = Path(__file__).parent / "results" / "cpu_speed.json"

TARGETS = {
    "prefill_vs_llama": (">=", 1.0),
    "decode_vs_llama": (">=", 0.5),
    "batch_8_vs_batch_1": (">=", 2.0),
    "peak_rss_vs_checkpoint": ("<=", 2.5),
    "first_token_seconds": ("<=", 4.0),
}


def prompt_tokens(count: int, vocab_size: int) -> list[int]:
    """Token ids without a pattern that a cache could use. The text does not matter for speed."""
    return [(7919 * i + 104_729) % (vocab_size - 100) + 50 for i in range(count)]


class Timing(NamedTuple):
    """Seconds of one generation."""

    first_token: float
    other_tokens: float


def peak_rss() -> int:
    """High-water mark of this process's resident set, in bytes.

    From ``/proc`` where there is one: unlike getrusage's figure it does not inherit the parent's.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def measure_llama(model: str, threads: int, extra_buffers: bool) -> dict[str, float]:
    """One process of llama.cpp. `extra_buffers`: let it repack weights for AMX where the processor has it."""
    import llama_cpp
    import numpy as np

    if not extra_buffers:
        bindings, defaults = llama_cpp.llama_cpp, llama_cpp.llama_cpp.llama_model_default_params

        def without_extra_buffers() -> Any:
            parameters = defaults()
            parameters.use_extra_bufts = False
            return parameters

        bindings.llama_model_default_params = without_extra_buffers
    llama = llama_cpp.Llama(
        model,
        n_ctx=CONTEXT,
        n_batch=PREFILL_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    vocab = llama.n_vocab()

    def greedy(prompt: int, tokens: int) -> Timing:
        """Time to the first token, and of the others."""
        llama.reset()
        start = time.perf_counter()
        llama.eval(prompt_tokens(prompt, vocab))
        chosen = int(np.argmax(llama.scores[llama.n_tokens - 1]))
        first = time.perf_counter()
        for _ in range(tokens - 1):
            llama.eval([chosen])
            chosen = int(np.argmax(llama.scores[llama.n_tokens - 1]))
        return Timing(first - start, time.perf_counter() - first)

    greedy(DECODE_PROMPT_TOKENS, 4)
    prefill = min(greedy(PREFILL_TOKENS, 1).first_token for _ in range(3))
    decode = min(greedy(DECODE_PROMPT_TOKENS, DECODE_TOKENS + 1).other_tokens for _ in range(2))
    return {
        "prefill": PREFILL_TOKENS / prefill,
        "decode": DECODE_TOKENS / decode,
        "peak_rss": peak_rss(),
        "extra_buffers": extra_buffers,
    }


def measure_vtserve(model: str, threads: int) -> dict[str, float]:
    """One process of vtserve, through `engine.llm.LLM`."""
    from engine.llm import LLM
    from engine.outputs import CompletionDelta
    from engine.sampling_params import SamplingParams

    with LLM(
        model,
        device="cpu",
        threads=threads,
        kv_cache_dtype="fp8",
        max_model_len=CONTEXT,
        max_num_seqs=BATCH,
        max_num_batched_tokens=PREFILL_TOKENS,
        kv_cache_memory=32 * 2**20,
        enable_prefix_caching=False,
    ) as llm:
        vocab = llm.limits.vocab_size

        def greedy(prompt: int, tokens: int, batch: int = 1) -> Timing:
            """Time until every sequence has its first token, and of the others."""
            times: list[float] = []

            def arrived(index: int, delta: CompletionDelta) -> None:
                times.append(time.perf_counter())

            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            outputs = llm.generate([prompt_tokens(prompt, vocab)] * batch, sampling, on_delta=arrived)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * batch
            first = times[batch - 1]  # all prompts fit in one step
            return Timing(first - start, times[-1] - first)

        greedy(DECODE_PROMPT_TOKENS, 4)
        prefill = min(greedy(PREFILL_TOKENS, 1).first_token for _ in range(3))
        decode = min(greedy(DECODE_PROMPT_TOKENS, DECODE_TOKENS + 1).other_tokens for _ in range(2))
        rss_batch_1 = peak_rss()
        greedy(DECODE_PROMPT_TOKENS, 4, BATCH)
        batch = min(greedy(DECODE_PROMPT_TOKENS, DECODE_TOKENS + 1, BATCH).other_tokens for _ in range(2))
    return {
        "prefill": PREFILL_TOKENS / prefill,
        "decode": DECODE_TOKENS / decode,
        "decode_batch_8": BATCH * DECODE_TOKENS / batch,
        "peak_rss_batch_1": rss_batch_1,
        "peak_rss": peak_rss(),
    }


def first_token_seconds(model: str, threads: int) -> float:
    """From the start of the command to the first byte of its output."""
    command = [sys.executable, "-m", "app.cli", "generate", "--model", model, "--device", "cpu", "--stream"]
    command += ["--threads", str(threads), "--max-tokens", "2", "--prompt", "The capital of France is"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} failed")
    return elapsed


def worker(python: str, engine: str, model: str, threads: int) -> dict[str, float]:
    """Measure `engine` in a fresh process of the interpreter `python`.

    Raises subprocess.CalledProcessError if it fails.
    """
    script = Path(__file__).resolve()
    command = [python, str(script), "--worker", engine, "--model", model, "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def llama_worker(python: str, gguf: str, threads: int) -> dict[str, float]:
    """Measure llama.cpp; without its AMX buffers where those crash (0.3.36 under some virtual machines)."""
    try:
        return worker(python, "llama.cpp", gguf, threads)
    except subprocess.CalledProcessError as error:
        if error.returncode >= 0:
            raise
        return worker(python, "llama.cpp-plain", gguf, threads)


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}


def demo_model() -> Path:
    from app.cli.progress import ProgressBar
    from app.demo_model import ensure_demo_model

    with ProgressBar(sys.stderr) as progress:
        return ensure_demo_model(progress)


def checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def report(result: dict[str, Any]) -> None:
    ours, theirs = result["vtserve"], result.get("llama.cpp", {})
    rows = [
        ("prefill, 512 tokens", "prefill", "tokens/s", 1.0),
        ("decode, batch 1", "decode", "tokens/s", 1.0),
        ("decode, batch 8", "decode_batch_8", "tokens/s", 1.0),
        ("peak resident set", "peak_rss", "MiB", 2.0**20),
        ("start-up to first token", "first_token_seconds", "s", 1.0),
    ]
    print(f"{'':<26}{'vtserve':>10}{'llama.cpp':>12}{'ratio':>8}")
    for label, key, unit, scale in rows:
        mine, other = ours[key] / scale, theirs.get(key)
        columns = f"{other / scale:>12.1f}{mine / (other / scale):>8.2f}" if other else " " * 20
        print(f"{label:<26}{mine:>10.1f}{columns}  {unit}")
    print()
    for name, (relation, bound) in TARGETS.items():
        if name in result["ratios"]:
            value = result["ratios"][name]
            met = value >= bound if relation == ">=" else value <= bound
            print(f"{name:<26}{value:>10.2f}  target {relation} {bound}  {'met' if met else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="NVFP4 checkpoint directory [the demo model]")
    parser.add_argument("--gguf", help="the same weights in Q4_1 for llama.cpp")
    parser.add_argument("--llama-python", help="interpreter of an environment that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each engine, by turns")
    parser.add_argument(
        "--worker", choices=["vtserve", "llama.cpp", "llama.cpp-plain"], help=argparse.SUPPRESS
    )
    args = parser.parse_args()

    if args.worker:
        if args.worker == "vtserve":
            figures = measure_vtserve(args.model, args.threads)
        else:
            figures = measure_llama(args.model, args.threads, extra_buffers=args.worker == "llama.cpp")
        print(json.dumps(figures))
        return

    if args.llama_python and not args.gguf:
        parser.error("--llama-python needs --gguf, the same weights for llama.cpp")
    model = Path(args.model) if args.model else demo_model()
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(worker(sys.executable, "vtserve", str(model), args.threads))
        if args.llama_python:
            theirs.append(llama_worker(args.llama_python, args.gguf, args.threads))
    result: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "python": platform.python_version(),
        "checkpoint_bytes": checkpoint_bytes(model),
        "vtserve": median_of(ours),
    }
    first_token_seconds(str(model), args.threads)
    result["vtserve"]["first_token_seconds"] = statistics.median(
        first_token_seconds(str(model), args.threads) for _ in range(3)
    )
    mine = result["vtserve"]
    result["ratios"] = {
        "batch_8_vs_batch_1": mine["decode_batch_8"] / mine["decode"],
        "peak_rss_vs_checkpoint": mine["peak_rss"] / result["checkpoint_bytes"],
        "first_token_seconds": mine["first_token_seconds"],
    }
    if theirs:
        other = result["llama.cpp"] = median_of(theirs)
        result["ratios"]["prefill_vs_llama"] = mine["prefill"] / other["prefill"]
        result["ratios"]["decode_vs_llama"] = mine["decode"] / other["decode"]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    report(result)


if __name__ == "__main__":
    main()
