"""Rotary embedding, norms per head, and the bytes that reach the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cpu.backend import CpuBackend
from engine.backend.protocol import AttentionSpec, DType, KVLayer, StepBatch
from tests.backend.cpu.conftest import LIMITS
from tests.backend.cuda.reference import from_bf16, from_e4m3, rotate

DTYPES = [DType.FLOAT8_E4M3, DType.BFLOAT16, DType.FLOAT32]
BLOCKS = 70


@dataclass(slots=True)
class Case:
    """One call and what it is made of."""

    qkv: np.ndarray
    batch: StepBatch
    kv: KVLayer
    spec: AttentionSpec


def make_case(
    backend: CpuBackend,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: DType = DType.FLOAT32,
    norms: bool = False,
    first_position: int = 0,
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    positions = np.arange(first_position, first_position + tokens, dtype=np.int32)
    slots = rng.permutation(BLOCKS * LIMITS.block_size)[:tokens].astype(np.int64)
    batch = StepBatch(
        token_ids=np.zeros(tokens, np.int32),
        positions=positions,
        slot_mapping=slots,
        query_start=np.array([0, tokens], np.int32),
        seq_lens=np.array([first_position + tokens], np.int32),
        block_tables=np.zeros((1, LIMITS.max_blocks_per_seq), np.int32),
        logits_rows=np.zeros(0, np.int32),
    )
    cache = np.full((BLOCKS, LIMITS.block_size, kv_heads, head_dim), 0x55, dtype.carrier)
    norm = [
        backend.from_host(rng.normal(1, 0.3, head_dim).astype(np.float32), DType.FLOAT32) for _ in range(2)
    ]
    inv_freq = (10_000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    return Case(
        qkv=rng.normal(size=(tokens, (heads + 2 * kv_heads) * head_dim)).astype(np.float32),
        batch=batch,
        kv=KVLayer(
            backend.from_host(cache, dtype),
            backend.from_host(cache, dtype),
            key_scale=float(np.float32(rng.uniform(0.003, 0.008))),
            value_scale=float(np.float32(rng.uniform(0.003, 0.008))),
        ),
        spec=AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            inv_freq=backend.from_host(inv_freq, DType.FLOAT32),
            q_norm=norm[0] if norms else None,
            k_norm=norm[1] if norms else None,
            norm_eps=1e-5,
        ),
    )


def run(backend: CpuBackend, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q part float32 [T, heads, D], and the rows that were stored, in their carrier [T, kv_heads, D]."""
    qkv = backend.from_host(case.qkv, DType.FLOAT32)
    backend.rope_and_store_kv(qkv, backend.prepare(case.batch), case.kv, case.spec)
    query = backend.to_host(qkv)[:, : case.spec.num_heads * case.spec.head_dim]
    shape = (-1, case.spec.num_kv_heads, case.spec.head_dim)
    keys, values = (backend.to_host(tensor).reshape(shape) for tensor in (case.kv.key, case.kv.value))
    slots = case.batch.slot_mapping
    untouched = np.setdiff1d(np.arange(len(keys)), slots)
    assert (keys[untouched] == 0x55).all(), "only the step's slots are written"
    assert (values[untouched] == 0x55).all(), "only the step's slots are written"
    return query.reshape(len(slots), case.spec.num_heads, -1), keys[slots], values[slots]


def expected(backend: CpuBackend, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v in float64 as they should be before they are stored."""
    spec = case.spec
    heads = case.qkv.astype(np.float64).reshape(len(case.qkv), -1, spec.head_dim)
    q, k, v = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + spec.norm_eps) * weight

    if spec.q_norm is not None and spec.k_norm is not None:
        q, k = norm(q, backend.to_host(spec.q_norm)), norm(k, backend.to_host(spec.k_norm))
    inv_freq = backend.to_host(spec.inv_freq)
    positions = case.batch.positions
    return (
        rotate(q, positions, inv_freq, spec.rope_magnitude),
        rotate(k, positions, inv_freq, spec.rope_magnitude),
        v,
    )


@given(
    tokens=st.integers(1, 20),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([2, 6, 10, 16, 64, 80, 96, 128]),
    norms=st.booleans(),
    first_position=st.sampled_from([0, 1, 777, 4000]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_rotates_as_in_float64(
    backend: CpuBackend,
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    norms: bool,
    first_position: int,
    seed: int,
) -> None:
    case = make_case(
        backend,
        tokens=tokens,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norms=norms,
        first_position=first_position,
        seed=seed,
    )
    q, k, v = expected(backend, case)
    query, keys, values = run(backend, case)
    np.testing.assert_allclose(query, q, atol=2e-6)
    np.testing.assert_allclose(keys, k, atol=2e-6)
    np.testing.assert_array_equal(values, v)


@pytest.mark.usefixtures("either_way")
def test_many_tokens(backend: CpuBackend) -> None:
    case = make_case(backend, tokens=300, heads=9, kv_heads=3, head_dim=64)
    q, k, v = expected(backend, case)
    query, keys, values = run(backend, case)
    np.testing.assert_allclose(query, q, atol=2e-6)
    np.testing.assert_allclose(keys, k, atol=2e-6)
    np.testing.assert_array_equal(values, v)


def test_magnitude_scales_cosine_and_sine(backend: CpuBackend) -> None:
    case = make_case(backend, tokens=5, heads=2, kv_heads=1, head_dim=16, first_position=9)
    plain = run(backend, case)
    case.spec = replace(case.spec, rope_magnitude=1.25)
    scaled = run(backend, case)
    np.testing.assert_allclose(scaled[0], 1.25 * plain[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[1], 1.25 * plain[1], rtol=1e-6)
    np.testing.assert_array_equal(scaled[2], plain[2])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_stored_bytes(backend: CpuBackend, dtype: DType, tokens: int) -> None:
    """Bit for bit: what is stored is the rounding of the float32 values that a float32 cache holds."""
    shape = {"tokens": tokens, "heads": 6, "kv_heads": 2, "head_dim": 32, "seed": 5}
    exact = make_case(backend, **shape)
    _, keys, values = run(backend, exact)
    case = make_case(backend, **shape, dtype=dtype)
    _, stored_keys, stored_values = run(backend, case)
    for found, x, scale in (
        (stored_keys, keys, case.kv.key_scale),
        (stored_values, values, case.kv.value_scale),
    ):
        if dtype is DType.FLOAT8_E4M3:
            scaled = np.clip(x / np.float32(scale), -448, 448)
            rounded = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            assert (np.abs(scaled) == 448).any() or tokens < 300, "the case saturates"
        elif dtype is DType.BFLOAT16:
            rounded = x.astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            rounded = x
        np.testing.assert_array_equal(found, rounded)


def test_exchanged_scales_are_seen(backend: CpuBackend) -> None:
    """The test above would notice if the key's scale were used for values."""
    case = make_case(backend, tokens=20, heads=2, kv_heads=2, head_dim=32, dtype=DType.FLOAT8_E4M3)
    _, keys, values = run(backend, case)
    case.kv.key_scale, case.kv.value_scale = case.kv.value_scale, case.kv.key_scale
    _, other_keys, other_values = run(backend, case)
    assert (keys != other_keys).mean() > 0.5
    assert (values != other_values).mean() > 0.5


def test_nan_and_infinity_reach_the_cache(backend: CpuBackend) -> None:
    case = make_case(backend, tokens=1, heads=1, kv_heads=1, head_dim=8, dtype=DType.FLOAT8_E4M3)
    case.qkv[0, 16:24] = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, 1.0]
    _, _, values = run(backend, case)
    decoded = from_e4m3(values[0, 0])
    np.testing.assert_array_equal(decoded[:7], [np.nan, 448, -448, 448, -448, 0, 0])

    case = make_case(backend, tokens=1, heads=1, kv_heads=1, head_dim=8, dtype=DType.BFLOAT16)
    case.qkv[0, 16:20] = [np.nan, np.inf, -np.inf, 3e38]
    _, _, values = run(backend, case)
    np.testing.assert_array_equal(from_bf16(values[0, 0])[:3], [np.nan, np.inf, -np.inf])
