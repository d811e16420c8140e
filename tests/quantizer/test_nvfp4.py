"""The scale search against ml_dtypes' number formats, the amax rule, and ModelOpt's own codes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quantizer.nvfp4 import (
    E2M1_VALUES,
    E4M3_POSITIVE,
    NVFP4Weight,
    amax_global_scale,
    dequantize,
    quantize,
)
from tests.checkpoints import CHECKPOINTS


def reference_values(weight: NVFP4Weight) -> np.ndarray:
    """Decode by ml_dtypes alone."""
    rows, columns = weight.shape
    codes = np.empty((rows, columns), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = weight.codes & 15, weight.codes >> 4
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = weight.group_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return elements * np.repeat(scales, 16, axis=1) * np.float32(weight.global_scale)


def amax_rule(weight: np.ndarray, global_scale: float) -> np.ndarray:
    """What everyone does: scale = e4m3(amax / 6), round to nearest; by ml_dtypes."""
    groups = weight.reshape(weight.shape[0], -1, 16)
    scales = np.abs(groups).max(axis=2) / np.float32(6 * global_scale)
    scales = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(global_scale)
    safe = np.where(scales > 0, scales, 1)[:, :, None]
    rounded = (groups / safe).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (rounded * scales[:, :, None]).reshape(weight.shape)


def squared_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum())


weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 40), st.integers(1, 4).map(lambda groups: 16 * groups)),
    elements=st.floats(-100, 100, width=32),
)


def test_the_grids_are_the_formats_own() -> None:
    every_code = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(every_code, [*E2M1_VALUES, *-E2M1_VALUES])
    assert len(E4M3_POSITIVE) == 127
    assert E4M3_POSITIVE[-1] == 448
    assert (np.diff(E4M3_POSITIVE) > 0).all()


@given(weights)
@settings(max_examples=60, deadline=None)
def test_decodes_as_ml_dtypes_does(weight: np.ndarray) -> None:
    quantized = quantize(weight)
    np.testing.assert_allclose(dequantize(quantized), reference_values(quantized), rtol=3e-7)


@given(weights)
@settings(max_examples=60, deadline=None)
def test_values_on_the_grid_come_back_exactly(weight: np.ndarray) -> None:
    once = dequantize(quantize(weight))
    # The grid of a tensor is its scale's: keep that, or another maximum gives another grid.
    scale = amax_global_scale(weight)
    np.testing.assert_allclose(dequantize(quantize(once, global_scale=scale)), once, rtol=1e-6)


@given(weights, st.floats(-30, 30))
@settings(max_examples=100, deadline=None)
def test_error_is_never_above_the_amax_rule(weight: np.ndarray, exponent: float) -> None:
    weight = weight * np.float32(2.0**exponent)
    scale = amax_global_scale(weight)
    ours = dequantize(quantize(weight, global_scale=scale))
    error, rule = squared_error(weight, ours), squared_error(weight, amax_rule(weight, scale))
    assert error <= rule * (1 + 1e-5) + 1e-37


def test_error_on_normal_weights_is_well_below_the_amax_rule() -> None:
    weight = np.random.default_rng(0).standard_normal((256, 256), np.float32)
    ours = squared_error(weight, dequantize(quantize(weight)))
    rule = squared_error(weight, amax_rule(weight, amax_global_scale(weight)))
    assert ours < 0.8 * rule


def test_steps_of_zero_are_the_amax_rule() -> None:
    weight = np.random.default_rng(1).standard_normal((64, 128), np.float32)
    ours = dequantize(quantize(weight, steps=(0, 0)))
    np.testing.assert_allclose(ours, amax_rule(weight, amax_global_scale(weight)), rtol=1e-6)


def test_importance_moves_error_to_columns_that_matter_less() -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((128, 64), np.float32)
    importance = np.where(np.arange(64) % 4 == 0, 100.0, 1.0).astype(np.float32)
    weighted = ((weight - dequantize(quantize(weight, importance=importance))) ** 2 * importance).sum()
    plain = ((weight - dequantize(quantize(weight))) ** 2 * importance).sum()
    assert weighted < 0.9 * plain


def test_importance_of_zero_is_survived() -> None:
    weight = np.random.default_rng(3).standard_normal((8, 32), np.float32)
    values = dequantize(quantize(weight, importance=np.zeros(32, np.float32)))
    assert np.isfinite(values).all()


@pytest.mark.parametrize("fill", [0.0, 1e-42, 1e-30, 3e38])
def test_extreme_weights_stay_finite(fill: float) -> None:
    weight = np.full((3, 32), fill, np.float32)
    values = dequantize(quantize(weight))
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values, weight, rtol=0.02, atol=1e-38)


def test_many_rows_are_split_without_a_seam() -> None:
    weight = np.random.default_rng(4).standard_normal((2500, 16), np.float32)
    scale = amax_global_scale(weight)
    whole = quantize(weight, global_scale=scale, threads=2)
    parts = [quantize(weight[i : i + 100], global_scale=scale) for i in range(0, 2500, 100)]
    np.testing.assert_array_equal(whole.codes, np.concatenate([part.codes for part in parts]))
    np.testing.assert_array_equal(whole.group_scales, np.concatenate([part.group_scales for part in parts]))


def test_columns_must_be_whole_groups() -> None:
    with pytest.raises(ValueError, match="multiple of 16 columns, got 24"):
        quantize(np.zeros((4, 24), np.float32))


@pytest.mark.parametrize("model", ["llama-tied", "llama-untied", "llama3-rope", "qwen2", "qwen3"])
def test_error_is_at_most_modelopts(model: str) -> None:
    original = read_safetensors(CHECKPOINTS / model / "bf16" / "model.safetensors")
    theirs = read_safetensors(CHECKPOINTS / model / "NVFP4-modelopt" / "model.safetensors")
    modules = [name.removesuffix("_scale_2") for name in theirs if name.endswith(".weight_scale_2")]
    assert len(modules) == 14, "two layers of seven linears"
    total_ours = total_theirs = 0.0
    for name in modules:
        weight = original[name].astype(np.float32)
        scale = float(theirs[f"{name}_scale_2"])
        made = NVFP4Weight(theirs[name], theirs[f"{name}_scale"].view(np.uint8), scale)
        error = squared_error(weight, dequantize(quantize(weight, global_scale=scale)))
        their_error = squared_error(weight, reference_values(made))
        assert error <= their_error, name
        total_ours, total_theirs = total_ours + error, total_theirs + their_error
    assert total_ours < 0.85 * total_theirs


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """By the format's definition: a header in JSON, then the bytes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    dtypes = {
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "U8": np.uint8,
        "F32": np.float32,
    }
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(raw[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors
