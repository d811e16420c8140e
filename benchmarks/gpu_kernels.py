"""How fast the CUDA kernels are, beside what the device's memory gives in the same run.

First the kernels' tests (``pytest -m gpu tests/backend/cuda``) are run: a wrong kernel has no speed. Then,
by replays of captured graphs over weights that together are several times the L2 cache:

- a device-to-device copy: its bandwidth, bytes read and written, is the ceiling that fractions refer to
- linear layers of the 8B-class model and two more, for 1 to 4096 tokens; bytes are those of codes and scales
- decode attention, 32 sequences of 4096 tokens over an FP8 cache; prefill attention, 8 of 4096
- the other operations of a step
- all kernels of a decode step of the 8B-class model, one after the other, sampling included

Needs a CUDA device. Prints a table and writes ``gpu_kernels.json`` to ``benchmarks/results`` or to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend.cuda.backend import CudaBackend
from engine.backend.cuda.inputs import CudaStepInputs
from engine.backend.cuda.linear import CudaLinear
from engine.backend.protocol import (
    AttentionSpec,
    DType,
    KVLayer,
    LinearSource,
    StepBatch,
    StepLimits,
    WeightFormat,
)
from engine.sampler import SamplingRow
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SHAPES = [(4096, 24_576), (12_288, 4096), (8192, 8192), (7168, 20_480)]
"""K, N"""
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
TARGETS = {1: 0.80, 16: 0.70, 64: 0.50}
"""fraction of the copy bandwidth, by tokens"""
ROTATED_BYTES = 400 << 20
"""weights that are used in turn: several times the L2 cache"""
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 4096, 12_288, 32, 8, 128, 151_936, 36
BLOCK = 16
LIMITS = StepLimits(
    max_tokens=32_768,
    max_seqs=256,
    max_blocks_per_seq=512,
    max_logits_rows=256,
    vocab_size=VOCABULARY,
    block_size=BLOCK,
)


class Bench:
    """Times closures on the backend's stream."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self.stream = backend.device.stream

    def seconds(self, calls: Sequence[Callable[[], None]], *, repeats: int = 5) -> float:
        """Median time of one of `calls`, which are captured in one graph and replayed."""
        from cuda.core import EventOptions

        device = self.backend.device
        for call in calls:
            call()
        device.stream.sync()

        def work() -> None:
            for call in calls:
                call()

        graph, _ = device.capture(work)
        graph.launch(self.stream)
        times = []
        for _ in range(repeats):
            begin = self.stream.record(options=EventOptions(timing_enabled=True))
            graph.launch(self.stream)
            end = self.stream.record(options=EventOptions(timing_enabled=True))
            end.sync()
            times.append((end - begin) / 1e3 / len(calls))
        graph.close()
        return float(np.median(times))


def open_backend() -> CudaBackend:
    """A backend with all its kernels, before `reserve`."""
    from engine.memory.cuda.device import CudaDeviceAccount, NvmlUsage
    from engine.memory.cuda.resources import CudaMallocMemoryResource
    from engine.memory.cuda.runtime import BoundCudaRuntime

    runtime = BoundCudaRuntime()
    memory = CudaMallocMemoryResource(CudaDeviceAccount(runtime, NvmlUsage()), runtime)
    backend = CudaBackend(memory, cache_dir=None)
    widest = [LinearSource("widest", format, (16, 12_288), np.empty(0, np.uint8)) for format in WeightFormat]
    backend._linear.load(widest)
    return backend


def random_source(rng: np.random.Generator, format: WeightFormat, rows: int, columns: int) -> LinearSource:
    scales = None
    if format is WeightFormat.NVFP4:
        weight = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = rng.integers(0x30, 0x48, (rows, columns // 16), np.uint8)
    elif format is WeightFormat.FP8:
        weight = rng.integers(0, 0x70, (rows, columns), np.uint8)
    else:
        weight = (rng.integers(0, 1 << 8, (rows, columns), np.uint16) + 0x3C00).astype(np.uint16)
    return LinearSource(f"{rows}x{columns}", format, (rows, columns), weight, scales, 0.001)


def random_bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values about one, both signs, as carriers."""
    signs = rng.integers(0, 2, shape, np.uint16) << 15
    return (signs | (rng.integers(0, 1 << 8, shape, np.uint16) + 0x3F00)).astype(np.uint16)


def copy_bandwidth(bench: Bench) -> float:
    """Bytes read and written a second, of a copy of 2 GiB."""
    from cuda.bindings import driver

    size = 2 << 30
    random = np.random.default_rng(3).integers(0, 256, size // 16, np.uint8)
    source = bench.backend.from_host(np.tile(random, 16), DType.UINT8)
    target = bench.backend.empty((size,), DType.UINT8)
    device = bench.backend.device

    def copy() -> None:
        (status,) = driver.cuMemcpyDtoDAsync(target.address, source.address, size, device.stream.handle)
        assert int(status) == 0

    best = 0.0
    for _ in range(3):
        from cuda.core import EventOptions

        begin = bench.stream.record(options=EventOptions(timing_enabled=True))
        for _ in range(5):
            copy()
        end = bench.stream.record(options=EventOptions(timing_enabled=True))
        end.sync()
        best = max(best, 5 * 2 * size / ((end - begin) / 1e3))
    source.buffer.close()
    target.buffer.close()
    return best


def close_linears(linears: Sequence[CudaLinear]) -> None:
    for linear in linears:
        for segment in linear.segments:
            segment.weight.buffer.close()


def linears(
    bench: Bench,
    rng: np.random.Generator,
    copy: float,
    formats: Sequence[tuple[WeightFormat, int, int]],
    tokens: Sequence[int],
) -> list[dict[str, Any]]:
    results = []
    backend = bench.backend
    for format, columns, rows in formats:
        source = random_source(rng, format, rows, columns)
        weight_bytes = source.weight.nbytes + (
            0 if source.group_scales is None else source.group_scales.nbytes
        )
        count = max(2, -(-ROTATED_BYTES // weight_bytes))
        begin = time.perf_counter()
        layers = [backend.load_linear([source]) for _ in range(count)]
        load = count * weight_bytes / (time.perf_counter() - begin)
        x = backend.from_host(random_bf16(rng, max(tokens), columns), DType.BFLOAT16)
        out = backend.empty((max(tokens), rows), DType.BFLOAT16)
        for m in tokens:
            calls = [partial(backend.linear, x.rows(m), layer, out=out.rows(m)) for layer in layers]
            if m >= 256:
                calls = calls[:2]
            seconds = bench.seconds(calls)
            results.append(
                {
                    "format": format.value,
                    "k": columns,
                    "n": rows,
                    "tokens": m,
                    "microseconds": seconds * 1e6,
                    "bytes_per_second": weight_bytes / seconds,
                    "fraction_of_copy": weight_bytes / seconds / copy,
                    "tflops": 2 * m * rows * columns / seconds / 1e12,
                    "load_bytes_per_second": load,
                }
            )
        close_linears(layers)
        x.buffer.close()
        out.buffer.close()
    return results


def batch_of(lengths: Sequence[int], queries: Sequence[int], columns: int) -> StepBatch:
    """A step of sequences whose blocks follow each other in the cache, shuffled."""
    rng = np.random.default_rng(1)
    needed = [-(-length // BLOCK) for length in lengths]
    order = rng.permutation(sum(needed)).astype(np.int32)
    tables = np.zeros((len(lengths), columns), np.int32)
    positions, slots, used = [], [], 0
    for index, (length, query) in enumerate(zip(lengths, queries, strict=True)):
        tables[index, : needed[index]] = order[used : used + needed[index]]
        used += needed[index]
        at = np.arange(length - query, length)
        positions.append(at)
        slots.append(tables[index, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK)
    return StepBatch(
        token_ids=rng.integers(0, VOCABULARY, sum(queries)).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots),
        query_start=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_tables=tables,
        logits_rows=(np.cumsum(queries) - 1).astype(np.int32),
    )


def kv_layers(backend: CudaBackend, count: int, blocks: int) -> list[KVLayer]:
    shape = (blocks, BLOCK, KV_HEADS, HEAD_DIM)
    rng = np.random.default_rng(2)
    data = rng.integers(0, 0x48, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    return [
        KVLayer(
            backend.from_host(data, DType.FLOAT8_E4M3), backend.from_host(data, DType.FLOAT8_E4M3), 0.1, 0.1
        )
        for _ in range(count)
    ]


def attention_spec(backend: CudaBackend) -> AttentionSpec:
    inv_freq = (1e6 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)
    return AttentionSpec(
        HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, backend.from_host(inv_freq, DType.FLOAT32)
    )


def attention(bench: Bench, rng: np.random.Generator, copy: float) -> list[dict[str, Any]]:
    backend, results = bench.backend, []
    spec = attention_spec(backend)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = backend.from_host(random_bf16(rng, LIMITS.max_tokens, width), DType.BFLOAT16)
    out = backend.empty((LIMITS.max_tokens, HEADS * HEAD_DIM), DType.BFLOAT16)
    for sequences, length in ((32, 4096), (1, 4096), (8, 1024), (256, 256)):
        layers = kv_layers(backend, 3, sequences * length // BLOCK)
        inputs = backend.prepare(batch_of([length] * sequences, [1] * sequences, LIMITS.max_blocks_per_seq))
        assert isinstance(inputs, CudaStepInputs)
        kv_bytes = 2 * sequences * length * KV_HEADS * HEAD_DIM
        for splits in (None, 1, 2, 3, 4, 8, 16):
            if splits is not None and (
                splits * sequences > 256 or (sequences, length) not in ((32, 4096), (1, 4096))
            ):
                continue
            calls = [
                lambda kv=kv, inputs=inputs, splits=splits, n=sequences: backend._attention(
                    qkv.rows(n), inputs, kv, spec, out.rows(n), splits=splits
                )
                for kv in layers * 3
            ]
            seconds = bench.seconds(calls)
            results.append(
                {
                    "kind": "decode",
                    "sequences": sequences,
                    "tokens": length,
                    "splits": splits or "chosen",
                    "microseconds": seconds * 1e6,
                    "bytes_per_second": kv_bytes / seconds,
                    "fraction_of_copy": kv_bytes / seconds / copy,
                }
            )
        for layer in layers:
            layer.key.buffer.close()
            layer.value.buffer.close()
    layers = kv_layers(backend, 1, 8 * 4096 // BLOCK)
    inputs = backend.prepare(batch_of([4096] * 8, [4096] * 8, LIMITS.max_blocks_per_seq))
    seconds = bench.seconds([lambda: backend.attention(qkv, inputs, layers[0], spec, out=out)], repeats=3)
    flops = 8 * HEADS * 4 * HEAD_DIM * 4096 * 4097 / 2
    results.append(
        {
            "kind": "prefill",
            "sequences": 8,
            "tokens": 4096,
            "microseconds": seconds * 1e6,
            "tflops": flops / seconds / 1e12,
        }
    )
    for tensor in (qkv, out, layers[0].key, layers[0].value):
        tensor.buffer.close()
    return results


def sampling_rows(count: int, **params: Any) -> list[SamplingRow]:
    empty = np.empty(0, np.int32)
    return [SamplingRow(str(i), SamplingParams(**params), i + 1, 7, empty, empty) for i in range(count)]


def small_kernels(bench: Bench, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Kernels that follow each other on one token: what a launch costs."""
    backend, results = bench.backend, []
    x, y, z = (backend.from_host(random_bf16(rng, 32, 2 * INTERMEDIATE), DType.BFLOAT16) for _ in range(3))
    weight = backend.from_host(np.ones(HIDDEN, np.float32), DType.FLOAT32)
    spec = attention_spec(backend)
    for tokens in (1, 32):
        layer = kv_layers(backend, 1, tokens * 256 // BLOCK)[0]
        inputs = backend.prepare(batch_of([192] * tokens, [1] * tokens, LIMITS.max_blocks_per_seq))
        assert isinstance(inputs, CudaStepInputs)
        narrow = [replace(tensor, shape=(tokens, HIDDEN)) for tensor in (x, y, z)]
        qkv = replace(x, shape=(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM))
        wide, activated = (
            replace(x, shape=(tokens, 2 * INTERMEDIATE)),
            replace(y, shape=(tokens, INTERMEDIATE)),
        )
        calls = {
            "rms_norm": partial(backend.rms_norm, narrow[0], weight, 1e-6, out=narrow[1]),
            "add_rms_norm": partial(backend.add_rms_norm, narrow[0], narrow[2], weight, 1e-6, out=narrow[1]),
            "silu_and_mul": partial(backend.silu_and_mul, wide, out=activated),
            "rope": partial(backend.rope_and_store_kv, qkv, inputs, layer, spec),
            "attention": partial(backend.attention, qkv, inputs, layer, spec, out=narrow[1]),
            "arrange": partial(backend._linear._arrange, x.address, tokens, HIDDEN),
        }
        for name, call in calls.items():
            entry: dict[str, Any] = {"kernel": name, "tokens": tokens}
            for overlap in (True, False):
                backend.device._overlaps = overlap
                backend.device._configs.clear()
                key = "microseconds" if overlap else "microseconds without overlap"
                entry[key] = bench.seconds([call] * 100) * 1e6
            backend.device._overlaps = True
            backend.device._configs.clear()
            results.append(entry)
    return results


class DecodeStep:
    """All kernels of a decode step of the 8B-class model, on weights of its own for every layer."""

    def __init__(self, backend: CudaBackend, rng: np.random.Generator) -> None:
        self.backend = backend
        qkv_rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        shapes = [
            (qkv_rows, HIDDEN),
            (HIDDEN, HEADS * HEAD_DIM),
            (2 * INTERMEDIATE, HIDDEN),
            (HIDDEN, INTERMEDIATE),
        ]
        sources = [random_source(rng, WeightFormat.NVFP4, *shape) for shape in shapes]
        begin = time.perf_counter()
        self.layers = [[backend.load_linear([source]) for source in sources] for _ in range(LAYERS)]
        backend.synchronize()
        self.nbytes = sum(linear.nbytes for layer in self.layers for linear in layer)
        self.load_bytes_per_second = self.nbytes / (time.perf_counter() - begin)
        self.head = backend.load_linear([random_source(rng, WeightFormat.BF16, VOCABULARY, HIDDEN)])
        self.norm = backend.from_host(np.ones(HIDDEN, np.float32), DType.FLOAT32)
        self.table = backend.as_table(self.head)
        self.spec = attention_spec(backend)
        widths = (HIDDEN, HIDDEN, HIDDEN, qkv_rows, HEADS * HEAD_DIM, 2 * INTERMEDIATE, INTERMEDIATE)
        self.tensors = [backend.from_host(random_bf16(rng, 256, width), DType.BFLOAT16) for width in widths]
        self.logits = backend.empty((256, VOCABULARY), DType.FLOAT32)

    def run(self, inputs: CudaStepInputs, kv: Sequence[KVLayer], parts: frozenset[str] = frozenset()) -> None:
        """Without the operations named in `parts`."""
        ops, n = self.backend, inputs.num_tokens
        residual, normed, hidden, qkv, attended, gate_up, activated = (
            tensor.rows(n) for tensor in self.tensors
        )
        ops.embedding(inputs.token_ids, self.table, out=residual)
        for (qkv_proj, o_proj, gate_up_proj, down_proj), cache in zip(self.layers, kv, strict=True):
            if "rows" not in parts:
                ops.add_rms_norm(residual, hidden, self.norm, 1e-6, out=normed)
            ops.linear(normed, qkv_proj, out=qkv)
            if "rows" not in parts:
                ops.rope_and_store_kv(qkv, inputs, cache, self.spec)
            if "attention" not in parts:
                ops.attention(qkv, inputs, cache, self.spec, out=attended)
            ops.linear(attended, o_proj, out=hidden)
            if "rows" not in parts:
                ops.add_rms_norm(residual, hidden, self.norm, 1e-6, out=normed)
            ops.linear(normed, gate_up_proj, out=gate_up)
            if "rows" not in parts:
                ops.silu_and_mul(gate_up, out=activated)
            ops.linear(activated, down_proj, out=hidden)
        if "head" not in parts:
            ops.linear(normed, self.head, out=self.logits.rows(n))

    def close(self) -> None:
        close_linears([linear for layer in self.layers for linear in layer])
        close_linears([self.head])
        for tensor in (*self.tensors, self.logits, self.norm):
            tensor.buffer.close()


def decode_step(bench: Bench, rng: np.random.Generator) -> list[dict[str, Any]]:
    backend = bench.backend
    step = DecodeStep(backend, rng)
    results: list[dict[str, Any]] = [
        {"kind": "load", "bytes": step.nbytes, "bytes_per_second": step.load_bytes_per_second}
    ]
    for sequences in (1, 8, 32, 128, 256):
        layers = kv_layers(backend, LAYERS, sequences * 256 // BLOCK)
        inputs = backend.prepare(batch_of([192] * sequences, [1] * sequences, LIMITS.max_blocks_per_seq))
        assert isinstance(inputs, CudaStepInputs)
        seconds = bench.seconds([partial(step.run, inputs, layers)])
        entry: dict[str, Any] = {
            "kind": "decode step",
            "sequences": sequences,
            "microseconds": seconds * 1e6,
            "tokens_per_second": sequences / seconds,
        }
        if sequences in (1, 32):
            for name in ("rows", "attention", "head"):
                less = bench.seconds([partial(step.run, inputs, layers, frozenset([name]))])
                entry[f"of which {name}"] = (seconds - less) * 1e6
            backend.device._overlaps = False
            backend.device._configs.clear()
            entry["microseconds without overlap"] = bench.seconds([partial(step.run, inputs, layers)]) * 1e6
            backend.device._overlaps = True
            backend.device._configs.clear()
            begin = time.perf_counter()
            for _ in range(10):
                step.run(inputs, layers)
            backend.synchronize()
            entry["microseconds without graph"] = (time.perf_counter() - begin) / 10 * 1e6
        logits = rng.normal(0, 2.5, (sequences, VOCABULARY)).astype(np.float32)
        backend._staging.upload(step.logits.address, logits)
        for name, params in {
            "greedy": {"temperature": 0.0},
            "temperature": {},
            "top-k top-p": {"top_k": 50, "top_p": 0.9},
        }.items():
            rows = sampling_rows(sequences, **params)
            begin = time.perf_counter()
            for _ in range(5):
                backend.sample(step.logits.rows(sequences), rows).wait()
            entry[f"sample {name}"] = (time.perf_counter() - begin) / 5 * 1e6
        results.append(entry)
        for layer in layers:
            layer.key.buffer.close()
            layer.value.buffer.close()
    step.close()
    return results


def run_tests(out: Path) -> dict[str, Any]:
    """The kernels' tests in a process of their own."""
    begin = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-o",
        "pythonpath=.",
        "-m",
        "gpu",
        "-q",
        "--tb=short",
        "--maxfail=25",
        "--durations=8",
        str(ROOT / "tests/backend/cuda"),
    ]
    done = subprocess.run(["timeout", "240", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    (out / "gpu_tests.log").write_text(done.stdout + done.stderr)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return {
        "passed": done.returncode == 0,
        "summary": done.stdout.strip().splitlines()[-1:],
        "seconds": time.perf_counter() - begin,
    }


def print_table(title: str, entries: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for entry in entries:
        values = (
            f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in entry.items()
        )
        print("  " + "  ".join(values))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--only", nargs="*", default=["linear", "attention", "small", "step"])
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if not arguments.skip_tests:
        results["tests"] = run_tests(arguments.out)

    begin = time.perf_counter()
    backend = open_backend()
    results["compile_seconds"] = time.perf_counter() - begin
    backend.reserve(LIMITS)
    bench, rng = Bench(backend), np.random.default_rng(0)
    copy = copy_bandwidth(bench)
    results["device"] = {"name": backend.device.device.name, "copy_bytes_per_second": copy}
    print(
        f"{results['device']['name']}: copy {copy / 1e12:.3f} TB/s; "
        f"kernels compiled in {results['compile_seconds']:.1f} s",
        flush=True,
    )

    def save() -> None:
        (arguments.out / "gpu_kernels.json").write_text(json.dumps(results, indent=1) + "\n")

    if "linear" in arguments.only:
        results["linear"] = linears(bench, rng, copy, [(WeightFormat.NVFP4, k, n) for k, n in SHAPES], TOKENS)
        results["linear"] += linears(
            bench,
            rng,
            copy,
            [
                (WeightFormat.NVFP4, 4096, 6144),
                (WeightFormat.NVFP4, 4096, 4096),
                (WeightFormat.FP8, 8192, 8192),
                (WeightFormat.BF16, 4096, VOCABULARY),
            ],
            [1, 8, 16, 64, 256],
        )
        print_table("linear", results["linear"])
        save()
    if "attention" in arguments.only:
        results["attention"] = attention(bench, rng, copy)
        print_table("attention", results["attention"])
        save()
    if "small" in arguments.only:
        results["small"] = small_kernels(bench, rng)
        print_table("small kernels", results["small"])
        save()
    if "step" in arguments.only:
        results["step"] = decode_step(bench, rng)
        print_table("decode step, 8B-class", results["step"])
        save()
    backend.close()
    save()
    missed = [
        e
        for e in results.get("linear", ())[: len(SHAPES) * len(TOKENS)]
        if e["fraction_of_copy"] < TARGETS.get(e["tokens"], 0)
    ]
    print_table("below target", missed)


if __name__ == "__main__":
    main()
