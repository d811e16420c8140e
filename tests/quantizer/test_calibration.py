"""Quantising while the model runs: what each half of the rows gets, and what the sink is handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine.backend.cpu import CpuBackend
from engine.backend.protocol import AttentionSpec, DType, KVLayer, LinearSource, StepLimits, WeightFormat
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from engine.model.config import RopeConfig
from engine.model.rope import inverse_frequencies
from engine.quantizer.calibration import (
    MAX_SEQUENCES,
    SEQUENCE_TOKENS,
    CalibrationText,
    Moments,
    QuantizedLinear,
    QuantizingBackend,
    bfloat16_to_float32,
)
from engine.quantizer.gptq import output_error
from engine.quantizer.nvfp4 import dequantize, quantize
from tests.quantizer.test_gptq import correlated_inputs

TOKENS, FEATURES = 24, 64
LIMITS = StepLimits(
    max_tokens=2 * TOKENS, max_seqs=2, max_blocks_per_seq=2, max_logits_rows=2, vocab_size=32, block_size=16
)


@pytest.fixture
def memory() -> HostMemoryResource:
    return HostMemoryResource(2**26)


@pytest.fixture
def inner(memory: HostMemoryResource) -> Iterator[CpuBackend]:
    backend = CpuBackend(memory, threads=1)
    yield backend
    backend.close()


def linear_source(name: str, rows: int, seed: int) -> LinearSource:
    weight = np.random.default_rng(seed).standard_normal((rows, FEATURES), np.float32)
    bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
    bias = np.linspace(-1, 1, rows, dtype=np.float32)
    return LinearSource(name, WeightFormat.BF16, (rows, FEATURES), bits, bias=bias)


SOURCES = {"q": linear_source("q", 48, 0), "k": linear_source("k", 16, 1)}
Make = Callable[..., QuantizingBackend]


@pytest.fixture
def make(inner: CpuBackend, memory: HostMemoryResource) -> Make:
    """Builds the backend under test over `inner`, for the linears named."""

    def build(
        *modules: str, sink: Callable[[QuantizedLinear], None] = lambda linear: None
    ) -> QuantizingBackend:
        def another() -> CpuBackend:
            return CpuBackend(memory, threads=1)

        def read_weight(module: str) -> np.ndarray:
            return bfloat16_to_float32(SOURCES[module].weight)

        return QuantizingBackend(
            inner, another, frozenset(modules), read_weight, np.ones(TOKENS, np.float32), sink
        )

    return build


def test_each_half_of_the_rows_goes_through_its_own_weights(make: Make) -> None:
    made: list[QuantizedLinear] = []
    backend = make("q", "k", sink=made.append)
    parts = [SOURCES["q"], SOURCES["k"]]
    pending = backend.load_linear(parts)
    backend.reserve(LIMITS)
    assert (pending.shape, pending.nbytes) == ((64, FEATURES), 0)
    assert made == [], "only noted"

    inputs = correlated_inputs(np.random.default_rng(2), 2 * TOKENS, FEATURES)
    with memory_scope("workspace/test"):
        x, out = backend.from_host(inputs, DType.FLOAT32), backend.empty((2 * TOKENS, 64), DType.FLOAT32)
    backend.linear(x, pending, out=out)
    result = backend.to_host(out)

    assert [linear.module for linear in made] == ["q", "k"]
    assert made[0].weight.global_scale == made[1].weight.global_scale, "one product, one global scale"
    assert made[0].input_amax == np.abs(inputs[:TOKENS]).max()
    assert backend.seen == {"q", "k"}
    original = np.concatenate([bfloat16_to_float32(part.weight) for part in parts])
    quantized = np.concatenate([dequantize(linear.weight) for linear in made])
    bias = np.concatenate([part.bias for part in parts if part.bias is not None])
    np.testing.assert_allclose(result[:TOKENS], inputs[:TOKENS] @ quantized.T + bias, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(result[TOKENS:], inputs[TOKENS:] @ original.T + bias, rtol=1e-3, atol=1e-3)
    assert not np.allclose(quantized, original, atol=1e-3)


def test_other_linears_are_the_inner_backends(make: Make) -> None:
    made: list[QuantizedLinear] = []
    backend = make("q", sink=made.append)
    with memory_scope("weights/head"):
        head = backend.load_linear([linear_source("lm_head", 32, 3)])
    assert head.nbytes > 0
    backend.reserve(LIMITS)
    inputs = np.ones((2, FEATURES), np.float32)
    with memory_scope("workspace/test"):
        x, out = backend.from_host(inputs, DType.FLOAT32), backend.empty((2, 32), DType.FLOAT32)
    backend.linear(x, head, out=out)
    assert made == []
    source = linear_source("lm_head", 32, 3)
    expected = inputs @ bfloat16_to_float32(source.weight).T + source.bias
    np.testing.assert_allclose(backend.to_host(out), expected, rtol=1e-5, atol=1e-5)


def test_nothing_that_was_quantised_stays_resident(make: Make, memory: HostMemoryResource) -> None:
    backend = make("q")
    pending = backend.load_linear([SOURCES["q"]])
    backend.reserve(LIMITS)
    with memory_scope("workspace/test"):
        x = backend.from_host(np.ones((2 * TOKENS, FEATURES), np.float32), DType.FLOAT32)
        out = backend.empty((2 * TOKENS, 48), DType.FLOAT32)
    before = memory.live
    backend.linear(x, pending, out=out)
    assert memory.live == before


def test_drifted_inputs_are_made_good_in_part() -> None:
    """Behind quantised layers inputs are off; the fitted weight is closer to the original outputs for it."""
    rng = np.random.default_rng(4)
    original = correlated_inputs(rng, 4000, FEATURES)
    drifted = original @ (np.eye(FEATURES) * 0.8 + rng.standard_normal((FEATURES, FEATURES)) * 0.02).astype(
        np.float32
    )
    weight = rng.standard_normal((32, FEATURES), np.float32)
    from engine.quantizer.gptq import quantize_with_feedback
    from engine.quantizer.nvfp4 import amax_global_scale

    moments, scale = Moments.of(drifted, original, np.ones(4000, np.float32)), 1.5 * amax_global_scale(weight)
    plain = dequantize(quantize_with_feedback(weight, moments.quantized, scale))
    fitted = dequantize(quantize_with_feedback(weight, moments.quantized, scale, cross=moments.cross))

    def error(made: np.ndarray) -> float:
        return float(((drifted @ made.T - original @ weight.T) ** 2).sum())

    assert error(fitted) < 0.6 * error(plain)
    everything = dequantize(
        quantize_with_feedback(weight, moments.quantized, scale, cross=moments.cross, propagation=1.0)
    )
    assert error(everything) < error(fitted), "this drift is no noise"


def test_moments_weigh_tokens() -> None:
    rng = np.random.default_rng(5)
    quantized, original = rng.standard_normal((2, 6, 4)).astype(np.float32)
    weights = np.array([2, 0, 1, 1, 1, 1], np.float32)
    moments = Moments.of(quantized, original, weights)
    expected = sum(w * np.outer(x, x) for w, x in zip(weights, quantized, strict=True)) / 6
    cross = sum(w * np.outer(x, y) for w, x, y in zip(weights, quantized, original, strict=True)) / 6
    np.testing.assert_allclose(moments.quantized, expected, rtol=1e-5)
    np.testing.assert_allclose(moments.cross, cross, rtol=1e-5)
    assert moments.amax == np.abs(quantized).max()


def test_wide_inputs_fall_back_on_importance(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.quantizer.calibration.MAX_FEEDBACK_FEATURES", 32)
    made: list[QuantizedLinear] = []
    backend = make("q", sink=made.append)
    pending = backend.load_linear([SOURCES["q"]])
    backend.reserve(LIMITS)
    inputs = correlated_inputs(np.random.default_rng(6), 2 * TOKENS, FEATURES)
    with memory_scope("workspace/test"):
        x, out = backend.from_host(inputs, DType.FLOAT32), backend.empty((2 * TOKENS, 48), DType.FLOAT32)
    backend.linear(x, pending, out=out)
    weight = bfloat16_to_float32(SOURCES["q"].weight)
    moments = Moments.of(inputs[:TOKENS], inputs[TOKENS:], np.ones(TOKENS, np.float32)).quantized
    made_error = output_error(weight, dequantize(made[0].weight), moments)
    assert made_error < output_error(weight, dequantize(quantize(weight)), moments)


def test_kv_scales_are_amax_of_what_was_stored(make: Make) -> None:
    heads, head_dim = 2, 16
    backend = make()
    text = CalibrationText(np.arange(TOKENS, dtype=np.int32)[None])
    limits = text.limits(vocab_size=32)
    assert limits == LIMITS
    backend.reserve(limits)
    with memory_scope("kv/test"):
        shape = (4, 16, heads, head_dim)
        cache = KVLayer(backend.empty(shape, DType.FLOAT32), backend.empty(shape, DType.FLOAT32))
        rope = backend.from_host(inverse_frequencies(RopeConfig(theta=10_000.0), head_dim), DType.FLOAT32)
    qkv = np.random.default_rng(7).standard_normal((2 * TOKENS, 3 * heads * head_dim)).astype(np.float32)
    qkv[3, 2 * heads * head_dim + 5] = -50.0  # v of a token of the quantised half
    qkv[TOKENS + 3, 2 * heads * head_dim + 5] = 900.0  # and of the original half
    with memory_scope("workspace/test"):
        device = backend.from_host(qkv, DType.FLOAT32)
    spec = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, rope)
    backend.rope_and_store_kv(device, backend.prepare(text.batch(limits)), cache, spec)
    [scales] = backend.kv_scales
    assert scales.value == pytest.approx(50 / 448)
    # Rotation keeps the length of each pair, so the largest key is between these.
    keys = qkv[:TOKENS, heads * head_dim : 2 * heads * head_dim].reshape(-1, 2, head_dim // 2)
    pairs = np.sqrt((keys**2).sum(axis=1)).max()
    assert 0.5 * pairs < scales.key * 448 <= pairs * (1 + 1e-5)


def test_text_is_cut_into_sequences() -> None:
    ids = list(range(10_000))
    text = CalibrationText.cut([7], ids)
    assert text.token_ids.shape == (MAX_SEQUENCES, SEQUENCE_TOKENS)
    assert (text.token_ids[:, 0] == 7).all()
    np.testing.assert_array_equal(text.token_ids[:, 1:].ravel(), ids[: MAX_SEQUENCES * (SEQUENCE_TOKENS - 1)])
    assert CalibrationText.cut([], ids[:2048]).token_ids.shape == (2, SEQUENCE_TOKENS)
    assert CalibrationText.cut([], ids[:100]).token_ids.shape == (1, 100)
    with pytest.raises(ValueError, match="at least two tokens"):
        CalibrationText.cut([7], [1])


def test_first_tokens_weigh_more_and_all_together_one_each() -> None:
    weights = CalibrationText.cut([], list(range(4096))).token_weights().reshape(4, 1024)
    assert weights.mean() == pytest.approx(1, rel=1e-5)
    share = weights[:, 0].sum() / weights.sum()
    assert share == pytest.approx(0.05 / 1.05, rel=0.01)


def test_batch_runs_every_sequence_twice_in_its_own_blocks() -> None:
    text = CalibrationText(np.arange(40, dtype=np.int32).reshape(2, 20))
    limits = text.limits(vocab_size=100)
    batch = text.batch(limits)
    np.testing.assert_array_equal(batch.token_ids, [*range(40), *range(40)])
    np.testing.assert_array_equal(batch.query_start, [0, 20, 40, 60, 80])
    np.testing.assert_array_equal(batch.seq_lens, [20] * 4)
    assert len(set(batch.slot_mapping.tolist())) == 80, "no slot is used twice"
    for sequence, table in enumerate(batch.block_tables):
        for position in range(20):
            slot = table[position // 16] * 16 + position % 16
            assert batch.slot_mapping[sequence * 20 + position] == slot
