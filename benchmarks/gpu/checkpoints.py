"""Whole models on the device against transformers' logits, and layer 0's stored bytes against float64.

The backend keeps activations in bfloat16, which costs these random-weight models more than the bounds of
the CPU's tests (float32 activations) allow for. So two things are said of every checkpoint and cache:

- `cpu_bound`: whether the CPU tests' bound holds all the same, with the figure;
- `limit`: the deviation may be no more than `SLACK` times what a float64 forward pass deviates that rounds
  activations to bfloat16 at the same places. That must hold.

Layer 0's E4M3 codes must be those of that float64 pass, except for a few where float32 and float64 round an
activation to neighbouring bfloat16 numbers; and none may be further off than such a step accounts for. With
exchanged or eightfold scales that must fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.gpu.results import Results
from engine.backend.protocol import DType, KVLayer
from tests.model.driver import Driver
from tests.model.test_reference import (
    CHUNK,
    MUTATED,
    MUTATIONS,
    NAMES,
    Case,
    deviation,
    greedy_mistakes,
    largest_deviation,
    mutated,
)
from tests.model.transformer import KVScales, Run, Transformer, e4m3_rounding, to_bfloat16, to_e4m3

SLACK = 1.5
CPU_BOUNDS = {"bfloat16": 0.02, "fp8": 0.01}
"""root mean square deviation, as tests/model/test_reference.py has it"""
SIGMAS = 5.0
"""A lead below so many times the noise that the rounding of activations puts on leads is a near-tie."""
MOST_OTHER_CODES = 0.01


class DeviceDriver(Driver):
    """A `Driver` on the CUDA backend."""

    def __init__(self, directory: Path, kv_dtype: DType, kernels: Path) -> None:
        from engine.backend.cuda.backend import CudaBackend
        from engine.memory.cuda.opening import open_cuda_memory

        memory = open_cuda_memory()
        super().__init__(directory, kv_dtype, memory=memory, backend=CudaBackend(memory, cache_dir=kernels))

    def poison(self, tensor: Any) -> None:
        from cuda.bindings import driver

        (status,) = driver.cuMemsetD8(tensor.address, 0xFF, tensor.nbytes)
        assert int(status) == 0, status


class HostDriver(Driver):
    """The same on the CPU, to try the script out where there is no device."""

    def __init__(self, directory: Path, kv_dtype: DType, kernels: Path) -> None:
        super().__init__(directory, kv_dtype)


def load_case(checkpoints: Path, name: str) -> Case:
    model, kind = name.split("/")
    directory = checkpoints / model
    prompts = json.loads((directory / f"ref-{kind}.json").read_text())["prompts"]
    logits = np.load(directory / f"ref-{kind}.logits.npz")
    return Case(name, directory / kind, prompts, logits, Transformer(directory / kind))


def bfloat16_cache(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return to_bfloat16(key), to_bfloat16(value)


def runs(case: Case, rounding: Any, *, rounded: bool) -> list[Run]:
    if rounded:
        return [case.transformer.run(tokens, rounding, to_bfloat16) for tokens in case.sequences]
    return [case.transformer.run(tokens, rounding) for tokens in case.sequences]


def lead_noise(exact: Sequence[Run], emulated: Sequence[Run]) -> float:
    """What rounding activations does to the lead of the likeliest token over the second: root mean square."""
    changes = []
    for plain, rounded in zip(exact, emulated, strict=True):
        second, first = np.argsort(plain.logits, axis=1)[:, -2:].T
        at = np.arange(len(first))
        leads = [run.logits[at, first] - run.logits[at, second] for run in (plain, rounded)]
        changes.append(leads[1] - leads[0])
    return float(np.sqrt(np.mean(np.square(np.concatenate(changes)))))


def against_transformers(
    case: Case, logits: Sequence[np.ndarray], near_tie: float
) -> tuple[float, float, list[float], int]:
    """Largest root mean square deviation of a prompt, largest of a logit; transformers' leads where the
    greedy token differs, and how many of them are no near-ties."""
    rms, largest, mistakes = 0.0, 0.0, 0
    parted: list[float] = []
    for prompt, found in zip(case.prompts, logits, strict=True):
        name, n = prompt["name"], prompt["n"]
        pairs = [(found[n - 1], case.logits[f"{name}_last"])]
        if f"{name}_all" in case.logits:
            pairs.append((found[:n], case.logits[f"{name}_all"]))
        for mine, theirs in pairs:
            rms, largest = max(rms, deviation(mine, theirs)), max(largest, largest_deviation(mine, theirs))
        leads = prompt["greedy32_margin_top1_top2"]
        parted += [leads[step] for step in greedy_mistakes(found, prompt, 0.0)]
        mistakes += len(greedy_mistakes(found, prompt, near_tie))
    return rms, largest, parted, mistakes


def compare_codes(driver: Driver, expected: Sequence[Run], scales: KVScales) -> tuple[int, int, int]:
    """Codes of layer 0 compared, those that differ, and those further off than a bfloat16 step explains."""
    total = different = unexplained = 0
    for sequence, run in enumerate(expected):
        stored = driver.stored(0, sequence, len(run.logits))
        for codes, exact, scale in zip(
            stored, (run.keys[0], run.values[0]), (scales.key, scales.value), strict=True
        ):
            # A step of one bfloat16 in what was rotated, and a few of those may come together in a product.
            step = 2.0**-7 * np.abs(exact).max(axis=-1, keepdims=True)
            nearest = to_e4m3(exact, scale)
            low, high = (
                to_e4m3(x, scale).view(ml_dtypes.float8_e4m3fn) for x in (exact - step, exact + step)
            )
            value = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            inside = (value >= low.astype(np.float32)) & (value <= high.astype(np.float32))
            unexplained += int((~inside).sum())
            different += int((codes != nearest).sum())
            total += codes.size
    return total, different, unexplained


def codes_are_right(counts: tuple[int, int, int]) -> bool:
    total, different, unexplained = counts
    return total > 10_000 and unexplained == 0 and different <= MOST_OTHER_CODES * total


def check(case: Case, name: str, driver_class: Any, kernels: Path, results: Results) -> dict[str, Any]:
    found: dict[str, Any] = {}
    scales = case.scales()
    caches = {
        "float32": (DType.FLOAT32, None),
        "bfloat16": (DType.BFLOAT16, bfloat16_cache),
        "fp8": (DType.FLOAT8_E4M3, e4m3_rounding(scales)),
    }
    for label, (dtype, rounding) in caches.items():
        driver = driver_class(case.directory, dtype, kernels)
        logits = driver.run(case.sequences, case.lengths, CHUNK)
        plain, emulated = runs(case, rounding, rounded=False), runs(case, rounding, rounded=True)
        deviations = [
            (deviation(mine, exact.logits), deviation(rounded.logits, exact.logits))
            for mine, exact, rounded in zip(logits, plain, emulated, strict=True)
        ]
        worst = max(mine for mine, _ in deviations)
        emulation = max(theirs for _, theirs in deviations)
        entry: dict[str, Any] = {"to_float64": worst, "emulated_bfloat16_to_float64": emulation}
        if label != "fp8":
            near_tie = SIGMAS * lead_noise(plain, emulated)
            rms, largest, parted, mistakes = against_transformers(case, logits, near_tie)
            entry |= {"to_transformers": rms, "largest_logit": largest}
            entry |= {"near_tie": near_tie, "leads_where_tokens_part": sorted(parted)}
            results.check(mistakes == 0, f"{name} {label}: {mistakes} greedy tokens differ beyond near-ties")
        bound = CPU_BOUNDS.get(label, 2e-4)
        entry["cpu_bound"] = {"bound": bound, "holds": entry.get("to_transformers", worst) < bound}
        results.check(
            worst <= SLACK * emulation + 1e-3, f"{name} {label}: {worst:.4f}, emulated {emulation:.4f}"
        )
        results.check(
            bool(np.isfinite(np.concatenate(logits)).all()), f"{name} {label}: logits are not numbers"
        )
        if label == "fp8":
            counts = compare_codes(driver, emulated, scales[0])
            entry["layer0_codes"] = dict(zip(("total", "different", "unexplained"), counts, strict=True))
            results.check(codes_are_right(counts), f"{name}: layer 0's codes {counts}")
            if name in MUTATED:
                entry["mutations"] = mutations(driver, case, emulated, scales[0], name, results)
        left = driver.close()
        results.check(left == 0, f"{name} {label}: {left} bytes were not given back")
        found[label] = entry
    return found


def mutations(
    driver: Driver, case: Case, emulated: list[Run], scales: KVScales, name: str, results: Results
) -> dict[str, int]:
    """Codes that differ when the cache is written and read with a wrong scale. Each must be noticed."""
    right: list[KVLayer] = driver.kv
    different = {}
    for mutation in MUTATIONS:
        driver.kv = [mutated(layer, mutation) for layer in right]
        driver.run(case.sequences, case.lengths, CHUNK)
        counts = compare_codes(driver, emulated, scales)
        different[mutation] = counts[1]
        results.check(not codes_are_right(counts), f"{name}: scales {mutation} are not noticed")
    driver.kv = right
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--host", action="store_true", help="try the script out on the CPU backend")
    parser.add_argument("--only", nargs="*", default=NAMES)
    arguments = parser.parse_args()
    results = Results(arguments.out)
    with tempfile.TemporaryDirectory() as kernels:
        for name in arguments.only:
            try:
                case = load_case(arguments.checkpoints, name)
                driver_class = HostDriver if arguments.host else DeviceDriver
                results.put(name, check(case, name, driver_class, Path(kernels), results))
            except Exception as error:
                results.check(False, f"{name}: {type(error).__name__}: {error}")
                print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    results.finish()


if __name__ == "__main__":
    main()
