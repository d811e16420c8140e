"""Every operation on a device, against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.backend.cuda import linear as linear_module
from engine.backend.cuda.backend import CudaBackend
from engine.backend.cuda.graphs import DecodeBucket, StepGraphs
from engine.backend.cuda.inputs import CudaStepInputs
from engine.backend.cuda.linear import CudaLinear
from engine.backend.cuda.products import Family
from engine.backend.cuda.tensor import CudaTensor
from engine.backend.protocol import AttentionSpec, DType, KVLayer, StepInputs, WeightFormat
from engine.sampler import INVALID_TOKEN, SamplingRow, sample
from engine.sampling_params import SamplingParams
from tests.backend.cuda import reference
from tests.backend.cuda.conftest import LIMITS
from tests.backend.cuda.reference import Sequences, relative_error

pytestmark = pytest.mark.gpu

BF16_ROUNDING = 3e-3
"""relative error of results that were rounded to bfloat16 once"""
FLOAT32_SUMS = 1e-5
"""relative error of products that were summed in float32"""
GUARD_ROWS = 2


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


class Arena:
    """Tensors of one test, given back at its end. Outputs are poisoned, with poisoned rows behind them."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self._tensors: list[CudaTensor] = []
        self._linears: list[CudaLinear] = []
        self._outputs: list[tuple[CudaTensor, int]] = []

    def put(self, array: np.ndarray, dtype: DType) -> CudaTensor:
        tensor = self.backend.from_host(array, dtype)
        self._tensors.append(tensor)
        return tensor

    def bf16(self, values: np.ndarray) -> CudaTensor:
        return self.put(reference.to_bf16(values), DType.BFLOAT16)

    def f32(self, values: np.ndarray) -> CudaTensor:
        return self.put(values.astype(np.float32), DType.FLOAT32)

    def i32(self, values: np.ndarray) -> CudaTensor:
        return self.put(values.astype(np.int32), DType.INT32)

    def out(self, rows: int, columns: int, dtype: DType = DType.BFLOAT16) -> CudaTensor:
        whole = self.put(
            np.full((rows + GUARD_ROWS, columns), -1, np.int64).astype(dtype.carrier)
            if dtype is not DType.FLOAT32
            else np.full((rows + GUARD_ROWS, columns), np.nan, np.float32),
            dtype,
        )
        self._outputs.append((whole, rows))
        return whole.rows(rows)

    def linear(self, *parts: reference.LinearSource) -> CudaLinear:
        linear = self.backend.load_linear(parts)
        assert isinstance(linear, CudaLinear)
        self._linears.append(linear)
        return linear

    def read(self, tensor: CudaTensor) -> np.ndarray:
        carrier = self.backend.to_host(tensor)
        return reference.from_bf16(carrier) if tensor.dtype is DType.BFLOAT16 else carrier.astype(np.float64)

    def close(self) -> None:
        for whole, rows in self._outputs:
            guard = self.backend.to_host(whole)[rows:]
            untouched = (
                np.isnan(guard) if whole.dtype is DType.FLOAT32 else guard == np.iinfo(guard.dtype).max
            )
            assert untouched.all(), "rows past the output were written"
        for tensor in self._tensors:
            tensor.buffer.close()
        for linear in self._linears:
            for segment in linear.segments:
                segment.weight.buffer.close()


@pytest.fixture
def arena(backend: CudaBackend):
    arena = Arena(backend)
    yield arena
    arena.close()


# -- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [16, 576, 4096, 5120, 77, 12_300])
def test_embedding_and_gathering_copy_rows(arena: Arena, rng: np.random.Generator, hidden: int) -> None:
    table = rng.integers(0, 1 << 16, (50, hidden), np.uint16)
    ids = rng.integers(0, 50, 9)
    for name in ("embedding", "gather"):
        out = arena.out(9, hidden)
        device_table, device_ids = arena.put(table, DType.BFLOAT16), arena.i32(ids)
        if name == "embedding":
            arena.backend.embedding(device_ids, device_table, out=out)
        else:
            arena.backend.gather_rows(device_table, device_ids, out=out)
        np.testing.assert_array_equal(arena.backend.to_host(out), table[ids])


@pytest.mark.parametrize("hidden", [16, 128, 576, 4096, 5120, 77, 12_300])
def test_norms(arena: Arena, rng: np.random.Generator, hidden: int) -> None:
    x, delta, weight = (
        rng.normal(0, 3, (7, hidden)),
        rng.normal(0, 1, (7, hidden)),
        rng.normal(1, 0.2, hidden),
    )
    x, delta = (reference.from_bf16(reference.to_bf16(values)) for values in (x, delta))
    weight = weight.astype(np.float32)

    def norm(values: np.ndarray) -> np.ndarray:
        return values / np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-5) * weight

    out = arena.out(7, hidden)
    arena.backend.rms_norm(arena.bf16(x), arena.f32(weight), 1e-5, out=out)
    assert relative_error(arena.read(out), norm(x)) < BF16_ROUNDING

    residual, out = arena.bf16(x), arena.out(7, hidden)
    arena.backend.add_rms_norm(residual, arena.bf16(delta), arena.f32(weight), 1e-5, out=out)
    added = reference.from_bf16(reference.to_bf16(x + delta))
    np.testing.assert_array_equal(arena.read(residual), added)
    assert relative_error(arena.read(out), norm(added)) < BF16_ROUNDING


@pytest.mark.parametrize("intermediate", [16, 1536, 12_288, 77])
def test_silu_and_mul(arena: Arena, rng: np.random.Generator, intermediate: int) -> None:
    x = reference.from_bf16(reference.to_bf16(rng.normal(0, 3, (5, 2 * intermediate))))
    out = arena.out(5, intermediate)
    arena.backend.silu_and_mul(arena.bf16(x), out=out)
    gate, up = np.split(x, 2, axis=1)
    assert relative_error(arena.read(out), gate / (1 + np.exp(-gate)) * up) < BF16_ROUNDING


# -- linear layers -----------------------------------------------------------------------------------------

TOKENS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 300]
SHAPES = [
    (16, 128),
    (1, 16),
    (17, 48),
    (100, 80),
    (576, 576),
    (192, 1040),
    (1536, 576),
    (4096, 4096),
    (6144, 4096),
    (264, 12_288),
]


def check_linear(
    arena: Arena, rng: np.random.Generator, parts: list[reference.LinearSource], tokens: list[int]
) -> None:
    linear = arena.linear(*parts)
    weight = np.concatenate([reference.dense(part) for part in parts])
    bias = np.concatenate([np.zeros(part.shape[0]) if part.bias is None else part.bias for part in parts])
    assert linear.shape == weight.shape
    x = reference.from_bf16(reference.to_bf16(rng.normal(0, 1, (max(tokens), weight.shape[1]))))
    expected = x @ weight.T + bias
    for count in tokens:
        device_x = arena.bf16(x[:count])
        exact, rounded = arena.out(count, linear.shape[0], DType.FLOAT32), arena.out(count, linear.shape[0])
        arena.backend.linear(device_x, linear, out=exact)
        arena.backend.linear(device_x, linear, out=rounded)
        assert relative_error(arena.read(exact), expected[:count]) < FLOAT32_SUMS, count
        assert relative_error(arena.read(rounded), expected[:count]) < BF16_ROUNDING, count


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(arena: Arena, rng: np.random.Generator, format: WeightFormat, shape: tuple[int, int]) -> None:
    check_linear(arena, rng, [reference.random_linear(rng, format, *shape)], TOKENS)


@pytest.mark.parametrize("format", [WeightFormat.NVFP4, WeightFormat.FP8])
@pytest.mark.parametrize("shape", [(16, 128), (100, 80), (192, 1040), (4096, 4096)])
def test_linear_by_the_portable_kernels(
    arena: Arena,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    format: WeightFormat,
    shape: tuple[int, int],
) -> None:
    monkeypatch.setattr(linear_module, "families_of", lambda *_, **__: (Family.PORTABLE,))
    monkeypatch.setattr(linear_module, "family_of", lambda *_, **__: Family.PORTABLE)
    check_linear(arena, rng, [reference.random_linear(rng, format, *shape)], TOKENS)


@pytest.mark.parametrize("format", [WeightFormat.FP8, WeightFormat.BF16])
@pytest.mark.parametrize("shape", [(33, 77), (5, 1), (130, 131)])
def test_linear_of_columns_that_cannot_be_read_together(
    arena: Arena, rng: np.random.Generator, format: WeightFormat, shape: tuple[int, int]
) -> None:
    check_linear(arena, rng, [reference.random_linear(rng, format, *shape)], TOKENS)


def test_parts_keep_their_own_scales_where_they_share_a_block(arena: Arena, rng: np.random.Generator) -> None:
    for format in WeightFormat:
        parts = [reference.random_linear(rng, format, rows, 272, bias=rows == 24) for rows in (40, 24, 5, 33)]
        check_linear(arena, rng, parts, [1, 7, 40, 140])


def test_parts_of_different_formats(arena: Arena, rng: np.random.Generator) -> None:
    formats = [
        WeightFormat.NVFP4,
        WeightFormat.NVFP4,
        WeightFormat.FP8,
        WeightFormat.BF16,
        WeightFormat.NVFP4,
    ]
    parts = [reference.random_linear(rng, f, 30 + 7 * i, 160) for i, f in enumerate(formats)]
    check_linear(arena, rng, parts, [1, 7, 40, 140])


@pytest.mark.parametrize("shape", [(16, 128), (1, 16), (17, 144), (40, 400), (9000, 4096)])
def test_repacking_makes_the_documented_layout(
    arena: Arena, rng: np.random.Generator, shape: tuple[int, int]
) -> None:
    source = reference.random_linear(rng, WeightFormat.NVFP4, *shape)
    linear = arena.linear(source)
    assert source.group_scales is not None
    expected = reference.pack_nvfp4(reference.codes_of(source.weight), source.group_scales)
    np.testing.assert_array_equal(arena.backend.to_host(linear.segments[0].weight), expected)
    source = reference.random_linear(rng, WeightFormat.FP8, *shape)
    linear = arena.linear(source)
    expected = reference.pack_fp8(source.weight)
    np.testing.assert_array_equal(arena.backend.to_host(linear.segments[0].weight), expected)


def test_a_product_is_the_same_every_time(arena: Arena, rng: np.random.Generator) -> None:
    linear = arena.linear(reference.random_linear(rng, WeightFormat.NVFP4, 2048, 12_288))
    for tokens in (1, 8, 16, 20, 64, 200):
        x = arena.bf16(rng.normal(0, 1, (tokens, 12_288)))
        results = []
        for _ in range(5):
            out = arena.out(tokens, 2048, DType.FLOAT32)
            arena.backend.linear(x, linear, out=out)
            results.append(arena.backend.to_host(out))
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def test_a_bf16_linear_is_its_own_embedding_table(arena: Arena, rng: np.random.Generator) -> None:
    source = reference.random_linear(rng, WeightFormat.BF16, 300, 128)
    table = arena.backend.as_table(arena.linear(source))
    out = arena.out(3, 128)
    arena.backend.embedding(arena.i32(np.array([299, 0, 7])), table, out=out)
    np.testing.assert_array_equal(arena.backend.to_host(out), source.weight[[299, 0, 7]])


# -- rope and attention ------------------------------------------------------------------------------------


class Layer:
    """Inputs of one attention layer, on the host and on the device."""

    def __init__(
        self,
        arena: Arena,
        rng: np.random.Generator,
        sequences: Sequences,
        heads: int,
        kv_heads: int,
        head_dim: int,
        cache: DType,
        *,
        window: int | None = None,
        norms: bool = False,
    ) -> None:
        columns = max(-(-length // sequences.block_size) for length in sequences.lengths)
        num_blocks = 3 + sum(-(-length // sequences.block_size) for length in sequences.lengths)
        self.batch = sequences.batch(rng, num_blocks, columns)
        # Beyond the sequences' tokens the cache holds NaN, which must not be seen.
        shape = (num_blocks, sequences.block_size, kv_heads, head_dim)
        poison = {DType.FLOAT8_E4M3: 0x7F, DType.BFLOAT16: 0x7FFF, DType.FLOAT32: np.nan}[cache]
        self.caches = [np.full(shape, poison, cache.carrier) for _ in range(2)]
        for carrier in self.caches:
            for index, length in enumerate(sequences.lengths):
                at = np.arange(length)
                blocks = self.batch.block_tables[index, at // sequences.block_size]
                values = rng.normal(0, 1, (length, kv_heads, head_dim)) * (1 + at[:, None, None] % 3)
                if cache is DType.FLOAT8_E4M3:
                    values = reference.to_e4m3(values * 20)
                elif cache is DType.BFLOAT16:
                    values = reference.to_bf16(values)
                carrier[blocks, at % sequences.block_size] = values
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.inv_freq = (1e4 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            inv_freq=arena.f32(self.inv_freq),
            rope_magnitude=1.25 if norms else 1.0,
            sliding_window=window,
            q_norm=arena.f32(rng.normal(1, 0.1, head_dim)) if norms else None,
            k_norm=arena.f32(rng.normal(1, 0.1, head_dim)) if norms else None,
        )
        self.kv = KVLayer(
            *(arena.put(carrier, cache) for carrier in self.caches), key_scale=0.05, value_scale=0.125
        )
        tokens = len(self.batch.token_ids)
        self.qkv = reference.from_bf16(
            reference.to_bf16(rng.normal(0, 1, (tokens, (heads + 2 * kv_heads) * head_dim)))
        )
        self.device_qkv = arena.bf16(self.qkv)
        inputs = arena.backend.prepare(self.batch)
        assert isinstance(inputs, CudaStepInputs)
        self.inputs = inputs

    def expected(self) -> np.ndarray:
        query = self.qkv[:, : self.heads * self.head_dim].reshape(-1, self.heads, self.head_dim)
        keys, values = (
            reference.stored_values(self.kv, carrier, scale)
            for carrier, scale in zip(self.caches, (0.05, 0.125), strict=True)
        )
        keys, values = (np.nan_to_num(array) for array in (keys, values))
        result = reference.attention(
            query, keys, values, self.batch, scale=self.spec.scale, window=self.spec.sliding_window
        )
        return result.reshape(len(result), -1)


STEPS = {
    "decode": Sequences([1, 16, 17, 300, 1000], [1, 1, 1, 1, 1], 16),
    "prefill": Sequences([40, 2, 129, 300], [40, 2, 129, 300], 16),
    "chunk": Sequences([400, 290, 64], [100, 33, 2], 32),
    "mixed": Sequences([700, 33, 90, 15], [1, 33, 20, 1], 16),
}


@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("cache", [DType.FLOAT8_E4M3, DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (4, 2, 32),
        (9, 3, 64),
        (8, 8, 64),
        (8, 2, 128),
        (10, 2, 128),
        (14, 2, 64),
        (16, 1, 128),
        (4, 2, 256),
        (3, 1, 80),
    ],
)
def test_attention(
    arena: Arena, rng: np.random.Generator, step: str, cache: DType, heads: int, kv_heads: int, head_dim: int
) -> None:
    for window in (None, 50):
        layer = Layer(arena, rng, STEPS[step], heads, kv_heads, head_dim, cache, window=window)
        out = arena.out(len(layer.batch.token_ids), heads * head_dim)
        arena.backend.attention(layer.device_qkv, layer.inputs, layer.kv, layer.spec, out=out)
        assert relative_error(arena.read(out), layer.expected()) < 6e-3, window


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splitting_a_sequence_changes_nothing(arena: Arena, rng: np.random.Generator, splits: int) -> None:
    layer = Layer(arena, rng, Sequences([1, 40, 5000], [1, 1, 1], 16), 8, 2, 128, DType.FLOAT8_E4M3)
    out = arena.out(3, 1024)
    arena.backend._attention(layer.device_qkv, layer.inputs, layer.kv, layer.spec, out, splits=splits)
    assert relative_error(arena.read(out), layer.expected()) < 4e-3


@pytest.mark.parametrize("cache", [DType.FLOAT8_E4M3, DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (9, 3, 64), (8, 2, 128), (3, 1, 80)])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_the_stored_cache(
    arena: Arena,
    rng: np.random.Generator,
    cache: DType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norms: bool,
) -> None:
    layer = Layer(
        arena, rng, Sequences([5, 70_000], [5, 9], 16), heads, kv_heads, head_dim, cache, norms=norms
    )
    arena.backend.rope_and_store_kv(layer.device_qkv, layer.inputs, layer.kv, layer.spec)

    x = layer.qkv.reshape(len(layer.qkv), -1, head_dim)
    query, key, value = np.split(x, [heads, heads + kv_heads], axis=1)
    if norms:
        assert layer.spec.q_norm is not None
        assert layer.spec.k_norm is not None
        weights = [arena.read(tensor) for tensor in (layer.spec.q_norm, layer.spec.k_norm)]
        query, key = (
            part / np.sqrt((part**2).mean(axis=-1, keepdims=True) + layer.spec.norm_eps) * weight
            for part, weight in zip((query, key), weights, strict=True)
        )
    query, key = (
        reference.rotate(part, layer.batch.positions, layer.inv_freq, layer.spec.rope_magnitude)
        for part in (query, key)
    )
    rotated = arena.read(layer.device_qkv).reshape(x.shape)[:, :heads]
    assert relative_error(rotated, query) < BF16_ROUNDING

    slots = layer.batch.slot_mapping
    for tensor, before, values, scale in zip(
        (layer.kv.key, layer.kv.value), layer.caches, (key, value), (0.05, 0.125), strict=True
    ):
        stored = arena.backend.to_host(tensor).reshape(-1, kv_heads, head_dim)
        untouched = (
            np.delete(stored, slots, axis=0).tobytes()
            == np.delete(before.reshape(stored.shape), slots, axis=0).tobytes()
        )
        assert untouched
        if cache is DType.FLOAT32:
            assert relative_error(stored[slots], values) < 1e-6
            continue
        if cache is DType.FLOAT8_E4M3:
            expected = reference.to_e4m3((values / np.float32(scale)).astype(np.float32))
            ordered = (stored[slots] & 0x7F).astype(int) - (expected & 0x7F).astype(int)
        else:
            expected = reference.to_bf16(values.astype(np.float32))
            ordered = (stored[slots] & 0x7FFF).astype(int) - (expected & 0x7FFF).astype(int)
        # float32 against float64 may fall on either side of a tie, never further.
        assert np.abs(ordered).max() <= 1
        assert (stored[slots] != expected).mean() < 2e-3


def test_stored_values_saturate(arena: Arena, rng: np.random.Generator) -> None:
    layer = Layer(arena, rng, Sequences([3], [3], 16), 1, 1, 32, DType.FLOAT8_E4M3)
    huge = arena.bf16(layer.qkv * 1000)
    arena.backend.rope_and_store_kv(huge, layer.inputs, layer.kv, layer.spec)
    stored = arena.backend.to_host(layer.kv.value).reshape(-1, 32)[layer.batch.slot_mapping]
    assert ((stored & 0x7F) == 0x7E).any()
    assert not ((stored & 0x7F) == 0x7F).any()


# -- a step's inputs and sampling --------------------------------------------------------------------------


def test_inputs_arrive(arena: Arena, rng: np.random.Generator) -> None:
    batches = [Sequences([33, 5, 700], [1, 5, 30], 16).batch(rng, 60, 100) for _ in range(5)]
    for batch in batches:
        inputs = arena.backend.prepare(batch)
        for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens", "logits_rows"):
            np.testing.assert_array_equal(arena.backend.to_host(getattr(inputs, name)), getattr(batch, name))
        tables = arena.backend.to_host(inputs.block_tables)
        np.testing.assert_array_equal(tables, batch.block_tables[:, : tables.shape[1]])
        assert tables.shape[1] >= 44


def test_a_graph_follows_its_inputs(arena: Arena, backend: CudaBackend, rng: np.random.Generator) -> None:
    """Steps of other tokens and fewer sequences, replayed where the first were captured."""
    graphs = StepGraphs(backend.device, enabled=True)
    graphs.reserve(LIMITS)
    hidden = 256
    table = rng.normal(size=(100, hidden)).astype(np.float32)
    table_on_device = arena.bf16(table)
    layer = arena.linear(reference.random_linear(rng, WeightFormat.NVFP4, 512, hidden))
    x, y = arena.out(8, hidden), arena.out(8, 512, DType.FLOAT32)

    def forward(inputs: StepInputs) -> CudaTensor:
        rows = inputs.num_tokens
        backend.embedding(inputs.token_ids, table_on_device, out=x.rows(rows))
        backend.linear(x.rows(rows), layer, out=y.rows(rows))
        return y.rows(rows)

    for sequences in (7, 5, 8, 6, 7):
        batch = Sequences([9] * sequences, [1] * sequences, 16).batch(rng, 100, 64)
        bucket = graphs.bucket_of(batch)
        assert bucket == DecodeBucket(8, 1024)
        writer = backend._inputs
        assert writer is not None
        inputs = writer.write(batch, bucket)
        found = backend.to_host(graphs.run(forward, inputs, bucket).rows(sequences))
        inputs = writer.write(batch, bucket)
        expected = backend.to_host(forward(inputs).rows(sequences))
        np.testing.assert_array_equal(found, expected)
    assert graphs.count == 1
    graphs.close()


def test_a_step_larger_than_its_limits_is_refused(backend: CudaBackend, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="room was reserved for 64"):
        backend.prepare(Sequences([1] * 65, [1] * 65, 16).batch(rng, 65, 4))


def row(index: int, **params: object) -> SamplingRow:
    return SamplingRow(
        request_id=str(index),
        params=SamplingParams(**params),
        key=0x9E3779B97F4A7C15 * (index + 1) % (1 << 64),
        position=index * 37 + 1,
        prompt_token_ids=np.arange(4, dtype=np.int32),
        output_token_ids=np.arange(5, dtype=np.int32),
    )


KINDS: dict[str, Callable[[int], SamplingRow]] = {
    "greedy": lambda i: row(i, temperature=0.0),
    "temperature": lambda i: row(i, temperature=0.3 + 0.2 * (i % 8)),
    "top-k": lambda i: row(i, top_k=1 + 7 * (i % 9)),
    "top-p": lambda i: row(i, top_p=0.05 + 0.1 * (i % 10)),
    "min-p": lambda i: row(i, min_p=0.01 * (1 + i % 20)),
    "all": lambda i: row(i, temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
    "on the host": lambda i: row(i, temperature=0.8, repetition_penalty=1.2, logprobs=2),
}


@pytest.mark.parametrize("vocabulary", [5, 512, 49_152, 151_936])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_the_device_chooses_what_the_host_does(
    arena: Arena, rng: np.random.Generator, vocabulary: int, kind: str
) -> None:
    kinds = list(KINDS.values()) if kind == "mixed" else [KINDS[kind]]
    rows = [kinds[i % len(kinds)](i) for i in range(64)]
    logits = rng.normal(0, 2.5, (64, vocabulary)).astype(np.float32)
    logits[::5] = logits[::5].round(1)  # ties
    logits[1, 0] = np.nan
    logits[2, 1] = np.inf
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    found = arena.backend.sample(arena.f32(logits), rows).wait()
    expected = sample(logits, rows)
    np.testing.assert_array_equal(found.token_ids[1:4], INVALID_TOKEN)
    assert found.token_ids[4] == 0
    # Probabilities in float32: a choice at the border of two tokens may fall to the neighbour.
    assert (found.token_ids != expected.token_ids).sum() <= (0 if kind in ("greedy", "on the host") else 1)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)


def test_the_choice_follows_the_probabilities(arena: Arena, rng: np.random.Generator) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)).reshape(1, 4).repeat(64, axis=0)
    device_logits = arena.f32(logits)
    counts = np.zeros(4)
    for trial in range(100):
        rows = [row(trial * 64 + i) for i in range(64)]
        counts += np.bincount(arena.backend.sample(device_logits, rows).wait().token_ids, minlength=4)
    assert np.abs(counts / counts.sum() - [0.5, 0.3, 0.15, 0.05]).max() < 0.02
