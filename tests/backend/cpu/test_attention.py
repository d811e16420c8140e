"""Paged attention, against float64 over the values that the cache really holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cpu import attention as attention_module
from engine.backend.cpu.backend import CpuBackend
from engine.backend.protocol import AttentionSpec, DType, KVLayer, StepLimits
from engine.errors import EngineError
from engine.memory.resources import HostMemoryResource
from tests.backend.cuda.reference import Sequences, attention, from_bf16, from_e4m3, to_bf16, to_e4m3

DTYPES = [DType.FLOAT8_E4M3, DType.BFLOAT16, DType.FLOAT32]
KEY_SCALE, VALUE_SCALE = 0.0125, 0.004


@dataclass(slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int


SMALL = Shape(6, 2, 16)


@pytest.fixture(scope="module")
def backends(memory: HostMemoryResource):
    """Backends by block size, which is fixed when one is made ready."""
    made: dict[tuple[int, int | None], CpuBackend] = {}

    def get(block_size: int, threads: int | None = None) -> CpuBackend:
        key = (block_size, threads)
        if key not in made:
            made[key] = CpuBackend(memory, threads=threads)
            made[key].reserve(
                StepLimits(
                    max_tokens=2048,
                    max_seqs=16,
                    max_blocks_per_seq=-(-12_000 // block_size),
                    max_logits_rows=16,
                    vocab_size=1000,
                    block_size=block_size,
                )
            )
        return made[key]

    yield get
    for backend in made.values():
        backend.close()


def fill_cache(
    backend: CpuBackend, rng: np.random.Generator, shape: Shape, blocks: int, block_size: int, dtype: DType
) -> tuple[KVLayer, np.ndarray, np.ndarray]:
    """A cache of random content, and the same as float64."""
    size = (blocks, block_size, shape.kv_heads, shape.head_dim)
    stored, exact = [], []
    for scale in (KEY_SCALE, VALUE_SCALE):
        values = rng.normal(size=size)
        if dtype is DType.FLOAT8_E4M3:
            carrier = to_e4m3(values / scale)
            exact.append(from_e4m3(carrier) * scale)
        elif dtype is DType.BFLOAT16:
            carrier = to_bf16(values)
            exact.append(from_bf16(carrier))
        else:
            carrier = values.astype(np.float32)
            exact.append(carrier.astype(np.float64))
        stored.append(backend.from_host(carrier, dtype))
    return KVLayer(*stored, key_scale=KEY_SCALE, value_scale=VALUE_SCALE), *exact


def make_spec(backend: CpuBackend, shape: Shape, window: int | None) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=1.3 * shape.head_dim**-0.5,
        inv_freq=backend.from_host(np.ones(shape.head_dim // 2, np.float32), DType.FLOAT32),
        sliding_window=window,
    )


def check(
    backend: CpuBackend,
    sequences: Sequences,
    shape: Shape,
    *,
    dtype: DType = DType.FLOAT8_E4M3,
    window: int | None = None,
    seed: int = 0,
    tolerance: float = 4e-6,
) -> np.ndarray:
    """Compare one call with the reference. Returns what it computed, float32 [T, heads, D]."""
    rng = np.random.default_rng(seed)
    blocks = sum(-(-length // sequences.block_size) for length in sequences.lengths) + 2
    batch = sequences.batch(
        rng, blocks, max(-(-length // sequences.block_size) for length in sequences.lengths)
    )
    kv, keys, values = fill_cache(backend, rng, shape, blocks, sequences.block_size, dtype)
    tokens = sum(sequences.queries)
    qkv = rng.normal(size=(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)).astype(np.float32)
    spec = make_spec(backend, shape, window)
    out = backend.empty((tokens, shape.heads * shape.head_dim), DType.FLOAT32)
    out.array.fill(np.nan)
    backend.attention(backend.from_host(qkv, DType.FLOAT32), backend.prepare(batch), kv, spec, out=out)
    query = qkv[:, : shape.heads * shape.head_dim].reshape(tokens, shape.heads, shape.head_dim)
    expected = attention(query.astype(np.float64), keys, values, batch, scale=spec.scale, window=window)
    found = backend.to_host(out).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, atol=tolerance)
    return found


@st.composite
def steps(draw: st.DrawFn) -> tuple[Sequences, Shape, int | None]:
    """Decode rows, whole prompts and later chunks of prompts in one step."""
    block_size = draw(st.sampled_from([1, 3, 16, 32]))
    lengths, queries = [], []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 330))
        lengths.append(length)
        queries.append(draw(st.sampled_from([1, 1, 2, 5, 40, length])))
        queries[-1] = min(queries[-1], length)
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = Shape(
        kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7])),
        kv_heads,
        draw(st.sampled_from([2, 10, 24, 64, 80])),
    )
    window = draw(st.sampled_from([None, None, 1, 5, 64, 100, 1000]))
    return Sequences(lengths, queries, block_size), shape, window


@given(step=steps(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999))
@settings(max_examples=120, deadline=None)
def test_mixed_steps(backends, step: tuple[Sequences, Shape, int | None], dtype: DType, seed: int) -> None:
    sequences, shape, window = step
    check(backends(sequences.block_size), sequences, shape, dtype=dtype, window=window, seed=seed)


@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("queries", [1, 37])
def test_large_heads(backends, head_dim: int, queries: int) -> None:
    check(backends(16), Sequences([150], [queries], 16), Shape(4, 2, head_dim), tolerance=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [8192, 8193, 11_111])
def test_long_context(backends, length: int, dtype: DType) -> None:
    """From 8,192 positions on, decoding works in longer chunks."""
    check(backends(16), Sequences([length, 5], [1, 1], 16), SMALL, dtype=dtype)
    check(backends(16), Sequences([length], [1], 16), SMALL, dtype=dtype, window=4000)


def test_what_the_chunks_leave_does_not_fit(backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then whole tokens are dealt out, with the same result, bit for bit."""
    sequences = Sequences([3000, 2000], [1, 1], 16)
    split = check(backends(16), sequences, SMALL)
    monkeypatch.setattr(attention_module, "PARTIALS", 10 * 8 * (SMALL.head_dim + 2))
    np.testing.assert_array_equal(check(backends(16), sequences, SMALL), split)


@pytest.mark.parametrize("queries", [1, 200])
def test_threads_do_not_change_the_result(backends, queries: int) -> None:
    sequences = Sequences([1500, 700], [queries, 1], 16)
    np.testing.assert_array_equal(
        check(backends(16, 1), sequences, SMALL), check(backends(16), sequences, SMALL)
    )


def test_a_token_does_not_depend_on_its_batch(backends) -> None:
    """Alone, or among so many that whole tokens are dealt out: the same bits."""
    backend = backends(16)
    rng = np.random.default_rng(3)
    lengths = [500, 33, 1200, 64, 65, 128, 700, 1, 900, 320]
    blocks = sum(-(-length // 16) for length in lengths) + 2
    batch = Sequences(lengths, [1] * len(lengths), 16).batch(rng, blocks, 80)
    kv, _, _ = fill_cache(backend, rng, SMALL, blocks, 16, DType.FLOAT8_E4M3)
    qkv = rng.normal(size=(len(lengths), 10 * SMALL.head_dim)).astype(np.float32)
    spec = make_spec(backend, SMALL, None)
    together = backend.empty((len(lengths), SMALL.heads * SMALL.head_dim), DType.FLOAT32)
    backend.attention(backend.from_host(qkv, DType.FLOAT32), backend.prepare(batch), kv, spec, out=together)
    alone = backend.empty((1, SMALL.heads * SMALL.head_dim), DType.FLOAT32)
    for index in range(len(lengths)):
        row = slice(index, index + 1)
        single = replace(
            batch,
            token_ids=batch.token_ids[row],
            positions=batch.positions[row],
            slot_mapping=batch.slot_mapping[row],
            query_start=np.array([0, 1], np.int32),
            seq_lens=batch.seq_lens[row],
            block_tables=batch.block_tables[row],
            logits_rows=np.zeros(1, np.int32),
        )
        backend.attention(
            backend.from_host(qkv[row], DType.FLOAT32), backend.prepare(single), kv, spec, out=alone
        )
        np.testing.assert_array_equal(backend.to_host(alone), backend.to_host(together)[row])


def test_cutting_a_prompt_does_not_change_its_tokens(backends) -> None:
    """A prompt at once or in chunks, with or without a window: the same bits."""
    backend = backends(16)
    length = 400
    for window in (None, 90):
        rng = np.random.default_rng(4)
        whole = Sequences([length], [length], 16).batch(rng, 30, 25)
        kv, _, _ = fill_cache(backend, rng, SMALL, 30, 16, DType.FLOAT8_E4M3)
        qkv = rng.normal(size=(length, 10 * SMALL.head_dim)).astype(np.float32)
        spec = make_spec(backend, SMALL, window)
        at_once = backend.empty((length, SMALL.heads * SMALL.head_dim), DType.FLOAT32)
        backend.attention(
            backend.from_host(qkv, DType.FLOAT32), backend.prepare(whole), kv, spec, out=at_once
        )
        for begin, end in ((0, 130), (130, 135), (135, 391), (391, 400)):
            rows = slice(begin, end)
            chunk = replace(
                whole,
                token_ids=whole.token_ids[rows],
                positions=whole.positions[rows],
                slot_mapping=whole.slot_mapping[rows],
                query_start=np.array([0, end - begin], np.int32),
                seq_lens=np.array([end], np.int32),
                logits_rows=np.zeros(1, np.int32),
            )
            out = backend.empty((end - begin, SMALL.heads * SMALL.head_dim), DType.FLOAT32)
            backend.attention(
                backend.from_host(qkv[rows], DType.FLOAT32), backend.prepare(chunk), kv, spec, out=out
            )
            np.testing.assert_array_equal(backend.to_host(out), backend.to_host(at_once)[rows])


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_is_not_lost(backends, where: str, queries: int) -> None:
    """A cache or activation that is not a number must show in the output, or nobody notices."""
    backend = backends(16)
    rng = np.random.default_rng(5)
    batch = Sequences([100], [queries], 16).batch(rng, 8, 7)
    kv, _, _ = fill_cache(backend, rng, SMALL, 8, 16, DType.FLOAT8_E4M3)
    qkv = rng.normal(size=(queries, 10 * SMALL.head_dim)).astype(np.float32)
    if where == "query":
        qkv[:, 3] = np.nan
    else:
        cache = kv.key if where == "key" else kv.value
        cache.array[batch.block_tables[0, 2], 5, 0, 3] = 0x7F
    out = backend.empty((queries, SMALL.heads * SMALL.head_dim), DType.FLOAT32)
    spec = make_spec(backend, SMALL, None)
    backend.attention(backend.from_host(qkv, DType.FLOAT32), backend.prepare(batch), kv, spec, out=out)
    found = np.isnan(backend.to_host(out).reshape(queries, SMALL.heads, SMALL.head_dim))
    group = 1 if where == "query" else SMALL.heads // SMALL.kv_heads
    column = 3 if where == "value" else slice(None)
    assert found[:, :group, column].all()
    assert not found[:, group:].any()


def test_large_scores_do_not_overflow(backends) -> None:
    """Scores of hundreds: only differences to the largest are exponentiated."""
    backend = backends(16)
    rng = np.random.default_rng(6)
    for queries in (1, 40):
        batch = Sequences([300], [queries], 16).batch(rng, 20, 19)
        kv, keys, values = fill_cache(backend, rng, SMALL, 20, 16, DType.FLOAT32)
        qkv = 200 * rng.normal(size=(queries, 10 * SMALL.head_dim)).astype(np.float32)
        spec = make_spec(backend, SMALL, None)
        out = backend.empty((queries, SMALL.heads * SMALL.head_dim), DType.FLOAT32)
        backend.attention(backend.from_host(qkv, DType.FLOAT32), backend.prepare(batch), kv, spec, out=out)
        query = qkv[:, : SMALL.heads * SMALL.head_dim].reshape(queries, SMALL.heads, -1)
        expected = attention(query.astype(np.float64), keys, values, batch, scale=spec.scale, window=None)
        np.testing.assert_allclose(backend.to_host(out).reshape(expected.shape), expected, atol=2e-3)


@pytest.mark.parametrize(("shape", "queries"), [(Shape(4, 4, 1100), 20), (Shape(512, 1, 64), 1)])
def test_heads_too_large_for_the_scratch_are_refused(backends, shape: Shape, queries: int) -> None:
    with pytest.raises(EngineError, match=f"heads of {shape.head_dim}"):
        check(backends(16), Sequences([40], [queries], 16), shape)
