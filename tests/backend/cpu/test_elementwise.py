"""Embedding lookup, row gathering and the gated activation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cpu.backend import CpuBackend
from engine.backend.cpu.exponential import exp
from engine.backend.protocol import DType
from tests.backend.cuda.reference import from_bf16, to_bf16


@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(1, 50),
    features=st.integers(1, 130),
    seed=st.integers(0, 999),
)
@settings(max_examples=30, deadline=None)
def test_embedding(backend: CpuBackend, rows: int, vocabulary: int, features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = to_bf16(rng.normal(size=(vocabulary, features)))
    ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    out = backend.empty((rows, features), DType.FLOAT32)
    backend.embedding(backend.from_host(ids, DType.INT32), backend.from_host(table, DType.BFLOAT16), out=out)
    np.testing.assert_array_equal(backend.to_host(out), from_bf16(table)[ids])


@given(
    rows=st.integers(1, 40), tokens=st.integers(1, 50), features=st.integers(1, 130), seed=st.integers(0, 999)
)
@settings(max_examples=30, deadline=None)
def test_gather_rows(backend: CpuBackend, rows: int, tokens: int, features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, features)).astype(np.float32)
    wanted = rng.integers(0, tokens, rows).astype(np.int32)
    out = backend.empty((rows, features), DType.FLOAT32)
    backend.gather_rows(backend.from_host(x, DType.FLOAT32), backend.from_host(wanted, DType.INT32), out=out)
    np.testing.assert_array_equal(backend.to_host(out), x[wanted])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
@pytest.mark.parametrize(("tokens", "features"), [(1, 1), (1, 1536), (3, 37), (200, 173), (7, 4681)])
def test_silu_and_mul(backend: CpuBackend, tokens: int, features: int, scale: float) -> None:
    rng = np.random.default_rng(features)
    gate_up = (rng.normal(size=(tokens, 2 * features)) * scale).astype(np.float32)
    out = backend.empty((tokens, features), DType.FLOAT32)
    backend.silu_and_mul(backend.from_host(gate_up, DType.FLOAT32), out=out)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(backend.to_host(out), expected, rtol=1e-6, atol=1e-30)


def test_silu_and_mul_keeps_nan(backend: CpuBackend) -> None:
    gate_up = np.array([[np.nan, 1.0, np.inf, -np.inf, 1.0, np.nan, 2.0, 2.0]], np.float32)
    out = backend.empty((1, 4), DType.FLOAT32)
    backend.silu_and_mul(backend.from_host(gate_up, DType.FLOAT32), out=out)
    np.testing.assert_array_equal(np.isnan(backend.to_host(out)[0, :2]), True)
    assert backend.to_host(out)[0, 2] == np.inf


def test_exp_is_accurate() -> None:
    x = np.linspace(-87.3, 88.0, 20_001, dtype=np.float32)
    found = np.array([exp(value) for value in x], np.float64)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(found - expected) / expected).max() < 1.5 * 2.0**-23
    assert exp(np.float32(0.0)) == 1.0


def test_exp_at_its_ends() -> None:
    assert np.isnan(exp(np.float32(np.nan)))
    assert 0 <= exp(np.float32(-np.inf)) < 1.2e-38
    assert 0 <= exp(np.float32(-1000.0)) < 1.2e-38
    assert exp(np.float32(1000.0)) > 1e38
