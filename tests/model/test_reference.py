"""Whole models against what transformers computed on the same checkpoints.

Measured on these checkpoints, as parts of the logits' standard deviation: with a float32 cache the largest
difference of any logit is 2e-5 to transformers and 1e-4 to float64. A bfloat16 cache moves them by 0.015
(root mean square), an E4M3 cache by 0.13: random weights make these models far more sensitive than trained
ones. That much noise would hide a wrong scale. So the E4M3 cache is compared with a forward pass in float64
that rounds keys and values in the same way: the differences left, 0.001, come of a few values next to a
rounding boundary. And layer 0's bytes are compared one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.backend.cpu import CpuBackend
from engine.backend.protocol import DType, KVLayer
from tests.model.driver import Driver
from tests.model.transformer import KVScales, Rounding, Run, Transformer, e4m3_rounding, to_e4m3

NAMES = [
    *(
        f"{model}/{kind}"
        for model in ("llama-tied", "llama-untied", "llama3-rope", "qwen2", "qwen3")
        for kind in ("bf16", "NVFP4-modelopt", "NVFP4A16-ct", "NVFP4-FP8KV-ct")
    ),
    "llama-mixed/MIXED-modelopt",
]
WITH_FP8_CACHE = [name for name in NAMES if name.endswith(("FP8KV-ct", "modelopt"))]
CHUNK = 77
"""tokens of a prompt in one step: prompts, the rest of them and single tokens get mixed, across blocks"""


@dataclass
class Case:
    """A checkpoint, its prompts with the greedy tokens of transformers, and what should come of them."""

    name: str
    directory: Path
    prompts: list[dict[str, Any]]
    logits: Any
    """transformers' own, by prompt"""
    transformer: Transformer

    @property
    def sequences(self) -> list[list[int]]:
        return [prompt["token_ids"] + prompt["greedy32"][:-1] for prompt in self.prompts]

    @property
    def lengths(self) -> list[int]:
        return [prompt["n"] for prompt in self.prompts]

    @cached_property
    def exact(self) -> list[Run]:
        """Nothing rounded."""
        return [self.transformer.run(tokens) for tokens in self.sequences]

    @cached_property
    def with_fp8_cache(self) -> list[Run]:
        """Keys and values rounded to E4M3 with the checkpoint's scales."""
        return self.rounded(e4m3_rounding(self.scales()))

    def scales(self) -> list[KVScales]:
        layers = range(self.transformer.num_layers)
        return [self.transformer.kv_scales(layer) or KVScales(1.0, 1.0) for layer in layers]

    def rounded(self, rounding: Rounding) -> list[Run]:
        return [self.transformer.run(tokens, rounding) for tokens in self.sequences]


@pytest.fixture(scope="module")
def cases(shared_checkpoints: Path) -> Callable[[str], Case]:
    loaded: dict[str, Case] = {}

    def load(name: str) -> Case:
        if name not in loaded:
            model, kind = name.split("/")
            directory = shared_checkpoints / model
            transformer = Transformer(directory / kind)
            prompts = json.loads((directory / f"ref-{kind}.json").read_text())["prompts"]
            logits = np.load(directory / f"ref-{kind}.logits.npz")
            loaded[name] = Case(name, directory / kind, prompts, logits, transformer)
        return loaded[name]

    return load


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture
def drive() -> Iterator[Callable[[Case, DType], Driver]]:
    """Makes drivers, and sees that they give everything back."""
    made: list[Driver] = []

    def make(case: Case, dtype: DType) -> Driver:
        made.append(Driver(case.directory, dtype, threads=1))
        return made[-1]

    yield make
    assert made
    for driver in made:
        assert driver.close() == 0


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square difference, as a part of the expected logits' standard deviation."""
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


def largest_deviation(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def greedy_mistakes(found: np.ndarray, prompt: dict[str, Any], margin: float) -> list[int]:
    """Steps where the likeliest token is not transformers', though that led by more than `margin`."""
    chosen = found[prompt["n"] - 1 :].argmax(axis=1)
    leads = prompt["greedy32_margin_top1_top2"]
    return [i for i, token in enumerate(prompt["greedy32"]) if chosen[i] != token and leads[i] > margin]


Compare = Callable[[np.ndarray, np.ndarray], None]


def compare_with_transformers(case: Case, logits: list[np.ndarray], compare: Compare) -> None:
    compared = 0
    for prompt, found in zip(case.prompts, logits, strict=True):
        name, n = prompt["name"], prompt["n"]
        compare(found[n - 1], case.logits[f"{name}_last"])
        if f"{name}_all" in case.logits:
            compare(found[:n], case.logits[f"{name}_all"])
            compared += n
    assert compared > 50, "the reference has logits of whole prompts"


def test_the_float64_forward_pass_is_right(case: Case) -> None:
    def compare(found: np.ndarray, expected: np.ndarray) -> None:
        assert largest_deviation(found, expected) < 1e-4

    logits = [run.logits for run in case.exact]
    compare_with_transformers(case, logits, compare)
    for prompt, found in zip(case.prompts, logits, strict=True):
        assert greedy_mistakes(found, prompt, 0.001) == []


def test_float32_cache(case: Case, drive: Callable[[Case, DType], Driver]) -> None:
    logits = drive(case, DType.FLOAT32).run(case.sequences, case.lengths, CHUNK)

    def compare(found: np.ndarray, expected: np.ndarray) -> None:
        assert largest_deviation(found, expected) < 2e-4

    compare_with_transformers(case, logits, compare)
    for prompt, found, run in zip(case.prompts, logits, case.exact, strict=True):
        assert largest_deviation(found, run.logits) < 1e-3
        assert greedy_mistakes(found, prompt, 0.005) == []


def test_bfloat16_cache(case: Case, drive: Callable[[Case, DType], Driver]) -> None:
    logits = drive(case, DType.BFLOAT16).run(case.sequences, case.lengths, CHUNK)

    def compare(found: np.ndarray, expected: np.ndarray) -> None:
        assert deviation(found, expected) < 0.02

    compare_with_transformers(case, logits, compare)

    def rounding(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) for x in (key, value))

    for prompt, found, run in zip(case.prompts, logits, case.rounded(rounding), strict=True):
        assert deviation(found, run.logits) < 0.002
        assert greedy_mistakes(found, prompt, 0.25) == []


def check_fp8_logits(case: Case, logits: list[np.ndarray], expected: list[Run]) -> None:
    for found, run in zip(logits, expected, strict=True):
        assert deviation(found, run.logits) < 0.01


def check_fp8_bytes(case: Case, driver: Driver, expected: list[Run], scales: KVScales) -> None:
    """Layer 0's keys and values, byte for byte.

    What lies so close to a rounding boundary that float32's error may carry it across may have either code.
    """
    different = total = 0
    for sequence, run in enumerate(expected):
        stored = driver.stored(0, sequence, len(run.logits))
        for codes, exact, scale in zip(
            stored, (run.keys[0], run.values[0]), (scales.key, scales.value), strict=True
        ):
            error = 3e-6 * np.abs(exact).max(axis=-1, keepdims=True)
            nearest, below, above = (to_e4m3(x, scale) for x in (exact, exact - error, exact + error))
            assert ((codes == nearest) | (codes == below) | (codes == above)).all()
            different += int((codes != nearest).sum())
            total += codes.size
    assert total > 10_000
    assert different < 1e-4 * total


def test_fp8_cache(case: Case, drive: Callable[[Case, DType], Driver]) -> None:
    scales = case.scales()
    assert (scales != [KVScales(1.0, 1.0)] * len(scales)) == (case.name in WITH_FP8_CACHE)
    driver = drive(case, DType.FLOAT8_E4M3)
    assert [(layer.key_scale, layer.value_scale) for layer in driver.kv] == [(s.key, s.value) for s in scales]
    logits = driver.run(case.sequences, case.lengths, CHUNK)
    expected = case.with_fp8_cache
    check_fp8_bytes(case, driver, expected, scales[0])
    check_fp8_logits(case, logits, expected)
    for found, run in zip(logits, case.exact, strict=True):
        assert deviation(found, run.logits) < 0.2


MUTATED = ["llama-tied/NVFP4-modelopt", "qwen3/NVFP4-FP8KV-ct", "llama-mixed/MIXED-modelopt"]
MUTATIONS: dict[str, Callable[[float, float], tuple[float, float]]] = {
    "exchanged": lambda key, value: (value, key),
    "key 8 times too large": lambda key, value: (8 * key, value),
    "key 8 times too small": lambda key, value: (key / 8, value),
    "value 8 times too large": lambda key, value: (key, 8 * value),
    "value 8 times too small": lambda key, value: (key, value / 8),
}


def mutated(kv: KVLayer, mutation: str) -> KVLayer:
    return KVLayer(kv.key, kv.value, *MUTATIONS[mutation](kv.key_scale, kv.value_scale))


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("case", MUTATED, indirect=True)
def test_a_cache_with_wrong_scales_is_noticed(
    case: Case, mutation: str, drive: Callable[[Case, DType], Driver]
) -> None:
    """Written and read with the same wrong scale, as when the loader is wrong.

    The bytes tell. The logits tell as well, but for scales that are 8 times too large: a floating-point
    format rounds x / 8 as it rounds x, unless it gets too small.
    """
    scales = case.scales()
    expected = case.with_fp8_cache
    driver = drive(case, DType.FLOAT8_E4M3)
    driver.kv = [mutated(layer, mutation) for layer in driver.kv]
    logits = driver.run(case.sequences, case.lengths, CHUNK)
    with pytest.raises(AssertionError):
        check_fp8_bytes(case, driver, expected, scales[0])
    if "too large" not in mutation:
        with pytest.raises(AssertionError):
            check_fp8_logits(case, logits, expected)


class MisreadingBackend:
    """A backend whose attention takes the cache to have other scales than it was written with."""

    def __init__(self, backend: CpuBackend, mutation: str) -> None:
        self._backend = backend
        self._mutation = mutation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attention(self, qkv: Any, inputs: Any, kv: KVLayer, spec: Any, *, out: Any) -> None:
        self._backend.attention(qkv, inputs, mutated(kv, self._mutation), spec, out=out)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("case", MUTATED, indirect=True)
def test_reading_with_wrong_scales_is_noticed(
    case: Case, mutation: str, drive: Callable[[Case, DType], Driver]
) -> None:
    """Written right and read wrong: the bytes are right, the logits tell."""
    scales = case.scales()
    expected = case.with_fp8_cache
    driver = drive(case, DType.FLOAT8_E4M3)
    misreading: Any = MisreadingBackend(driver.backend, mutation)
    driver.model.backend = misreading
    logits = driver.run(case.sequences, case.lengths, CHUNK)
    check_fp8_bytes(case, driver, expected, scales[0])
    with pytest.raises(AssertionError):
        check_fp8_logits(case, logits, expected)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("case", ["qwen3/NVFP4-modelopt", "qwen2/NVFP4-modelopt"], indirect=True)
def test_batching_does_not_change_the_logits(
    case: Case, dtype: DType, drive: Callable[[Case, DType], Driver]
) -> None:
    """All at once in small chunks, or one after the other with the prompt in one piece."""
    driver = drive(case, dtype)
    together = driver.run(case.sequences[:5], case.lengths[:5], 5)
    for found, tokens, length in zip(together, case.sequences, case.lengths, strict=False):
        (alone,) = driver.run([tokens], [length], length)
        assert deviation(found, alone) < (1e-5 if dtype is DType.FLOAT32 else 0.002)
