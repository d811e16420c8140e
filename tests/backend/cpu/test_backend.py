"""The backend as a whole: what it takes, when it takes it, and that it gives it back."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from engine.backend.cpu import CpuBackend
from engine.backend.protocol import (
    AttentionSpec,
    DType,
    KVLayer,
    LinearSource,
    StepInputs,
    StepLimits,
    WeightFormat,
)
from engine.errors import ConfigurationError, EngineError
from engine.memory.adaptors import FaultInjectingMemoryResource, StatisticsMemoryResource
from engine.memory.adaptors.fault_injecting import Fault
from engine.memory.errors import OutOfMemoryError
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from engine.sampler import SamplingRow
from engine.sampling_params import SamplingParams
from tests.backend.cuda.reference import Sequences, random_linear

LIMITS = StepLimits(
    max_tokens=64, max_seqs=8, max_blocks_per_seq=16, max_logits_rows=8, vocab_size=100, block_size=16
)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEATURES = 4, 2, 16, 64, 96
EMPTY = np.empty(0, np.int32)


class SmallModel:
    """One layer, as a model would run it, and the tensors that it holds."""

    def __init__(self, backend: CpuBackend) -> None:
        rng = np.random.default_rng(0)
        tokens, qkv = LIMITS.max_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.backend = backend
        with memory_scope("weights/model"):
            self.norm = backend.from_host(np.ones(HIDDEN, np.float32), DType.FLOAT32)
            inv_freq = backend.from_host(np.ones(HEAD_DIM // 2, np.float32), DType.FLOAT32)
            self.qkv = backend.load_linear([random_linear(rng, WeightFormat.NVFP4, qkv, HIDDEN)])
            self.gate_up = backend.load_linear([random_linear(rng, WeightFormat.FP8, 2 * FEATURES, HIDDEN)])
            self.head = backend.load_linear(
                [random_linear(rng, WeightFormat.BF16, LIMITS.vocab_size, HIDDEN)]
            )
            self.table = backend.as_table(self.head)
        self.spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, inv_freq)
        shape = (32, LIMITS.block_size, KV_HEADS, HEAD_DIM)
        with memory_scope("kv/layer"):
            self.kv = KVLayer(*(backend.empty(shape, DType.FLOAT8_E4M3) for _ in range(2)), 0.01, 0.01)
        for cache in (self.kv.key, self.kv.value):
            cache.array.fill(0)
        with memory_scope("workspace/activations"):
            self.activations = {
                name: backend.empty((tokens, width), DType.FLOAT32)
                for name, width in {
                    "residual": HIDDEN,
                    "normed": HIDDEN,
                    "qkv": qkv,
                    "attended": HEADS * HEAD_DIM,
                    "gate_up": 2 * FEATURES,
                    "activated": FEATURES,
                    "logits": LIMITS.vocab_size,
                }.items()
            }
        backend.reserve(LIMITS)

    def step(self, sequences: Sequences) -> np.ndarray:
        """Every operation once. Returns the chosen tokens."""
        ops = self.backend
        inputs = ops.prepare(sequences.batch(np.random.default_rng(1), 32, LIMITS.max_blocks_per_seq))
        n, r = inputs.num_tokens, inputs.num_logits_rows
        a = {name: tensor.rows(n) for name, tensor in self.activations.items()}
        ops.embedding(inputs.token_ids, self.table, out=a["residual"])
        ops.rms_norm(a["residual"], self.norm, 1e-5, out=a["normed"])
        ops.linear(a["normed"], self.qkv, out=a["qkv"])
        ops.rope_and_store_kv(a["qkv"], inputs, self.kv, self.spec)
        ops.attention(a["qkv"], inputs, self.kv, self.spec, out=a["attended"])
        ops.add_rms_norm(a["residual"], a["attended"], self.norm, 1e-5, out=a["normed"])
        ops.linear(a["normed"], self.gate_up, out=a["gate_up"])
        ops.silu_and_mul(a["gate_up"], out=a["activated"])
        ops.gather_rows(a["normed"], inputs.logits_rows, out=a["residual"].rows(r))
        ops.linear(a["residual"].rows(r), self.head, out=a["logits"].rows(r))
        ops.synchronize()
        return ops.sample(a["logits"].rows(r), sampling_rows(r)).token_ids


def sampling_rows(count: int) -> list[SamplingRow]:
    return [
        SamplingRow(
            request_id=str(row),
            params=SamplingParams(temperature=0.0),
            key=row,
            position=1,
            prompt_token_ids=EMPTY,
            output_token_ids=EMPTY,
        )
        for row in range(count)
    ]


STEPS = [Sequences([20, 30], [20, 30], 16), Sequences([21, 31, 200], [1, 1, 1], 16), Sequences([40], [9], 16)]


@pytest.fixture
def memory() -> HostMemoryResource:
    return HostMemoryResource(1 << 28)


def test_a_step_allocates_nothing(memory: HostMemoryResource) -> None:
    counting = StatisticsMemoryResource(memory)
    model = SmallModel(CpuBackend(counting))
    before = counting.statistics().to_dict()
    assert before["total"]["allocations"] > 20, "the load was counted"
    for round_ in range(50):
        tokens = model.step(STEPS[round_ % len(STEPS)])
        assert len(tokens) == len(STEPS[round_ % len(STEPS)].lengths)
    assert counting.statistics().to_dict() == before
    model.backend.close()


def test_every_byte_has_a_name(memory: HostMemoryResource) -> None:
    counting = StatisticsMemoryResource(memory)
    model = SmallModel(CpuBackend(counting))
    tags = counting.live_by_tag()
    reserved = {tag for tag in tags if tag not in ("weights/model", "kv/layer", "workspace/activations")}
    assert reserved >= {"io/token_ids", "io/block_tables", "workspace/scratch"}
    assert all(tag.startswith(("io/", "workspace/")) for tag in reserved)
    assert sum(tags.values()) == memory.live
    model.backend.close()
    assert not reserved & {tag for tag, live in counting.live_by_tag().items() if live}


def test_close_gives_back_what_the_backend_holds_and_the_model_the_rest(memory: HostMemoryResource) -> None:
    backend = CpuBackend(memory)
    model = SmallModel(backend)
    model.step(STEPS[0])
    held = sum(
        tensor.nbytes
        for tensor in [
            model.norm,
            model.spec.inv_freq,
            model.kv.key,
            model.kv.value,
            *model.activations.values(),
        ]
    )
    held += model.qkv.nbytes + model.gate_up.nbytes + model.head.nbytes
    assert memory.live > held
    backend.close()
    assert memory.live == held
    backend.close()
    gc.disable()  # counting references must be enough
    try:
        del model
        assert memory.live == 0
    finally:
        gc.enable()


def test_the_backend_keeps_no_weights_once_it_is_ready(memory: HostMemoryResource) -> None:
    model = SmallModel(CpuBackend(memory))
    live, weights = memory.live, model.gate_up.nbytes
    model.gate_up = model.head
    assert memory.live == live - weights


@pytest.mark.parametrize("tag", ["io/block_tables", "workspace/scratch", "workspace/attention.partials"])
def test_a_reserve_that_fails_leaves_nothing_behind(memory: HostMemoryResource, tag: str) -> None:
    failing = FaultInjectingMemoryResource(memory, [Fault(tag=tag)])
    backend = CpuBackend(failing)
    with pytest.raises(OutOfMemoryError, match=re.escape(f"tag={tag}")):
        backend.reserve(LIMITS)
    assert failing.injected == 1
    backend.close()
    assert memory.live == 0


@pytest.mark.parametrize("dtype", DType)
def test_there_and_back(memory: HostMemoryResource, dtype: DType) -> None:
    backend = CpuBackend(memory)
    array = np.random.default_rng(0).integers(0, 100, (3, 7)).astype(dtype.carrier)
    tensor = backend.from_host(array[:, ::-1], dtype)
    copy = backend.to_host(tensor)
    np.testing.assert_array_equal(copy, array[:, ::-1])
    copy[:] = 0
    np.testing.assert_array_equal(backend.to_host(tensor), array[:, ::-1])
    with pytest.raises(AssertionError, match=f"{dtype.label} travels as"):
        backend.from_host(array.astype(np.float64), dtype)


def test_tied_embeddings_share_one_buffer(memory: HostMemoryResource) -> None:
    backend = CpuBackend(memory)
    weight = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16).view(np.uint16)
    linear = backend.load_linear([LinearSource("embed", WeightFormat.BF16, (3, 4), weight)])
    live = memory.live
    table = backend.as_table(linear)
    assert memory.live == live
    np.testing.assert_array_equal(backend.to_host(table), weight)
    other = backend.load_linear([random_linear(np.random.default_rng(0), WeightFormat.NVFP4, 16, 32)])
    with pytest.raises(ValueError, match="only a BF16 linear is a table"):
        backend.as_table(other)
    backend.close()


def test_threads(memory: HostMemoryResource) -> None:
    assert CpuBackend(memory, threads=1).threads == 1
    with pytest.raises(ConfigurationError, match="--threads 0"):
        CpuBackend(memory, threads=0)


@pytest.mark.parametrize("operation", ["rope_and_store_kv", "attention"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (3, 16, KV_HEADS, HEAD_DIM),
            "a step up to block 7 of 16 tokens does not fit a cache of 3 blocks of 16",
        ),
        ((32, 8, KV_HEADS, HEAD_DIM), "does not fit a cache of 32 blocks of 8"),
        ((32, 16, 1, HEAD_DIM), "a cache of 1 heads of 16 does not fit attention over 2 of 16"),
        ((32, 16, KV_HEADS, 8), "a cache of 2 heads of 8 does not fit attention over 2 of 16"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(
    memory: HostMemoryResource, operation: str, shape: tuple[int, ...], message: str
) -> None:
    backend = CpuBackend(memory)
    model = SmallModel(backend)
    inputs = backend.prepare(Sequences([120], [4], 16).batch(np.random.default_rng(0), 8, 8))
    kv = KVLayer(backend.empty(shape, DType.FLOAT32), backend.empty(shape, DType.FLOAT32))
    qkv, out = model.activations["qkv"].rows(4), model.activations["attended"].rows(4)
    calls: dict[str, Callable[[StepInputs], None]] = {
        "rope_and_store_kv": lambda inputs: backend.rope_and_store_kv(qkv, inputs, kv, model.spec),
        "attention": lambda inputs: backend.attention(qkv, inputs, kv, model.spec, out=out),
    }
    with pytest.raises(EngineError, match=message):
        calls[operation](inputs)
    backend.close()


def test_sampling_is_the_samplers(memory: HostMemoryResource) -> None:
    backend = CpuBackend(memory)
    logits = np.zeros((2, 9), np.float32)
    logits[0, 4] = logits[1, 7] = 3.0
    sampled = backend.sample(backend.from_host(logits, DType.FLOAT32), sampling_rows(2))
    assert sampled.token_ids.tolist() == [4, 7]
