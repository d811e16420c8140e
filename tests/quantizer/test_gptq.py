"""Error feedback: it lowers the error of the outputs, on inputs it did not see too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quantizer.gptq import damped, output_error, quantize_with_feedback
from engine.quantizer.nvfp4 import E2M1_VALUES, amax_global_scale, dequantize, quantize


def correlated_inputs(rng: np.random.Generator, tokens: int, features: int) -> np.ndarray:
    """Inputs as layers see them: few directions hold most of it, and a few features are much larger."""
    mixing = rng.standard_normal((-(-features // 4), features))
    inputs = rng.standard_normal((tokens, len(mixing))) @ mixing + rng.standard_normal((tokens, features))
    inputs[:, ::17] *= 4
    return inputs.astype(np.float32)


def moments_of(inputs: np.ndarray) -> np.ndarray:
    return (inputs.T @ inputs).astype(np.float64) / len(inputs)


def test_output_error_is_that_of_the_outputs() -> None:
    rng = np.random.default_rng(0)
    weight, other = rng.standard_normal((2, 8, 32), np.float32)
    inputs = correlated_inputs(rng, 50, 32)
    expected = ((inputs @ weight.T - inputs @ other.T) ** 2).sum() / len(inputs)
    assert output_error(weight, other, moments_of(inputs)) == pytest.approx(expected, rel=1e-4)


def test_feedback_halves_the_error_of_outputs_and_holds_on_other_inputs() -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((96, 160), np.float32)
    inputs = correlated_inputs(rng, 6000, 160)
    seen, unseen = moments_of(inputs[:3000]), moments_of(inputs[3000:])
    scale = amax_global_scale(weight)
    searched = dequantize(quantize(weight, global_scale=scale, importance=np.diag(seen).astype(np.float32)))
    fed_back = dequantize(quantize_with_feedback(weight, seen, scale))
    assert output_error(weight, fed_back, seen) < 0.5 * output_error(weight, searched, seen)
    assert output_error(weight, fed_back, unseen) < 0.5 * output_error(weight, searched, unseen)


@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_refinement_never_raises_the_loss(seed: int, rows: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, 16 * groups), np.float32)
    moments = moments_of(correlated_inputs(rng, 8 * groups, 16 * groups))
    scale = amax_global_scale(weight)
    losses = [
        output_error(
            weight, dequantize(quantize_with_feedback(weight, moments, scale, refinements=n)), damped(moments)
        )
        for n in range(3)
    ]
    for before, after in itertools.pairwise(losses):
        assert after <= before * (1 + 1e-4)


def test_one_group_of_one_row_is_near_the_best_of_all_codes() -> None:
    """Three weights that matter, others zero and unseen: every code can be tried."""
    rng = np.random.default_rng(2)
    inputs = np.zeros((64, 16), np.float32)
    inputs[:, :3] = correlated_inputs(rng, 64, 3)
    weight = np.zeros((1, 16), np.float32)
    weight[0, :3] = [0.9, -2.3, 6.0]
    moments, scale = moments_of(inputs), amax_global_scale(weight)
    made = dequantize(quantize_with_feedback(weight, moments, scale))
    values = np.concatenate([E2M1_VALUES, -E2M1_VALUES[1:]])
    codes = np.array(list(itertools.product(values, repeat=3)), np.float32)
    best = np.inf
    for group_scale in np.arange(0.5, 1.6, 0.005):
        error = codes * np.float32(group_scale) - weight[0, :3]
        best = min(best, float(np.einsum("ck,kj,cj->c", error, moments[:3, :3], error).min()))
    assert output_error(weight, made, moments) <= 2 * best + 1e-3


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((70, 48), np.float32)
    moments, scale = moments_of(correlated_inputs(rng, 200, 48)), 0.001
    stacked = quantize_with_feedback(weight, moments, scale)
    alone = quantize_with_feedback(weight[40:41], moments, scale)
    np.testing.assert_array_equal(stacked.codes[40:41], alone.codes)
    np.testing.assert_array_equal(stacked.group_scales[40:41], alone.group_scales)


def test_inputs_that_were_always_zero_are_rounded_as_weights() -> None:
    weight = np.random.default_rng(4).standard_normal((16, 32), np.float32)
    scale = amax_global_scale(weight)
    made = quantize_with_feedback(weight, np.zeros((32, 32)), scale, refinements=0)
    np.testing.assert_array_equal(made.codes, quantize(weight, global_scale=scale).codes)


def test_damped_moments_are_positive_definite() -> None:
    inputs = np.zeros((3, 32), np.float32)
    inputs[:, 4] = 1e-9
    for moments in (moments_of(inputs), np.zeros((32, 32))):
        assert np.linalg.eigvalsh(damped(moments)).min() > 0.05
