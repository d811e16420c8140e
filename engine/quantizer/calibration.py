"""Quantises a model while it runs over a calibration text: one forward pass makes every linear.

`QuantizingBackend` stands between the model and a real backend. The model loads through it, but linears that
are to be quantised are only noted. When the forward pass comes to one, its inputs are there: their second
moments are taken, the weight is quantised for them, handed to the sink, used for this one product, and
dropped. So each linear is calibrated on what the quantised ones before it really put out, and no more than
one linear is resident at a time.

Every sequence runs twice in the same batch, once through the quantised weights and once through the original
ones (the first and the second half of the rows). The second tells what a linear *should* put out, and lets it
make good part of the error of those before it (as in GPTAQ, Li et al. 2025, and quantisation error
propagation, Arai & Ichikawa 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from engine.backend.protocol import (
    AttentionSpec,
    Backend,
    DType,
    KVLayer,
    Linear,
    LinearSource,
    StepBatch,
    StepInputs,
    StepLimits,
    Tensor,
    WeightFormat,
)
from engine.memory.scope import memory_scope
from engine.quantizer.gptq import quantize_with_feedback
from engine.quantizer.modelopt import KVScales
from engine.quantizer.nvfp4 import GROUP_SIZE, NVFP4Weight, amax_global_scale, quantize
from engine.sampler import PendingTokens, SamplingRow

__all__ = ["CalibrationText", "Moments", "QuantizedLinear", "QuantizingBackend"]

SEQUENCE_TOKENS = 1024
MAX_SEQUENCES = 4
SINK_SHARE = 0.05
"""part of all token weights that the first tokens of the sequences get. They are one in a thousand, but every
later token attends to them (attention sinks, Xiao et al. 2023), so their error is everyone's."""
HEADROOM = 1.5
"""of the global scale over amax / 2688: feedback moves weights past the largest of the original ones"""
MAX_FEEDBACK_FEATURES = 12_288
"""inputs wider than this are calibrated by the diagonal of their moments: the inverse takes K³ operations"""


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Token ids, cut into sequences of the same length."""

    token_ids: np.ndarray
    """int32 [sequences, length]"""

    @classmethod
    def cut(cls, prefix: Sequence[int], token_ids: Sequence[int]) -> CalibrationText:
        """Up to `MAX_SEQUENCES` sequences that begin with `prefix` (the tokenizer's own special tokens).

        Raises
        ------
        ValueError
            There are fewer than two tokens.
        """
        body = SEQUENCE_TOKENS - len(prefix)
        if len(token_ids) < 2:
            raise ValueError("a calibration text needs at least two tokens")
        if len(token_ids) < body:
            return cls(np.array([[*prefix, *token_ids]], np.int32))
        count = min(MAX_SEQUENCES, len(token_ids) // body)
        rows = [[*prefix, *token_ids[i * body : (i + 1) * body]] for i in range(count)]
        return cls(np.array(rows, np.int32))

    def limits(self, vocab_size: int, block_size: int = GROUP_SIZE) -> StepLimits:
        """One step that runs every sequence twice."""
        sequences, length = self.token_ids.shape
        return StepLimits(
            max_tokens=2 * sequences * length,
            max_seqs=2 * sequences,
            max_blocks_per_seq=-(-length // block_size),
            max_logits_rows=2 * sequences,
            vocab_size=vocab_size,
            block_size=block_size,
        )

    def batch(self, limits: StepLimits) -> StepBatch:
        """All sequences, then all of them again; logits of last tokens only, which nobody reads."""
        length = self.token_ids.shape[1]
        sequences, blocks = limits.max_seqs, limits.max_blocks_per_seq
        tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
        positions = np.tile(np.arange(length, dtype=np.int32), sequences)
        starts = np.arange(sequences + 1, dtype=np.int32) * length
        first_slots = np.repeat(np.arange(sequences, dtype=np.int64) * blocks * limits.block_size, length)
        return StepBatch(
            token_ids=np.tile(self.token_ids.ravel(), 2),
            positions=positions,
            slot_mapping=first_slots + positions,
            query_start=starts,
            seq_lens=np.full(sequences, length, np.int32),
            block_tables=tables,
            logits_rows=starts[1:] - 1,
        )

    def token_weights(self) -> np.ndarray:
        """float32 [sequences * length], mean 1: the first token of each sequence counts `SINK_SHARE` of
        all."""
        weights = np.ones(self.token_ids.shape, np.float32)
        weights[:, 0] = max(1.0, SINK_SHARE * self.token_ids.shape[1])
        return np.ravel(weights / weights.mean())


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Weighted second moments of a linear's inputs over the calibration tokens, float64 [K, K]."""

    quantized: np.ndarray
    """H = X̂ᵀ X̂, X̂ being the inputs behind quantised layers"""
    cross: np.ndarray
    """X̂ᵀ X, X being the inputs behind the original layers"""
    amax: float
    """largest magnitude of X̂"""

    @classmethod
    def of(cls, quantized: np.ndarray, original: np.ndarray, weights: np.ndarray) -> Moments:
        """Moments of float32 [T, K] inputs with token weights [T]."""
        root = np.sqrt(weights / len(weights))[:, None]
        amax = float(np.abs(quantized).max(initial=0.0))
        scaled = quantized * root
        # NumPy does half the work for a matrix times its own transpose.
        second, cross = scaled.T @ scaled, scaled.T @ (original * root)
        return cls(second.astype(np.float64), cross.astype(np.float64), amax)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """What the sink gets."""

    module: str
    weight: NVFP4Weight
    input_amax: float


@dataclass(frozen=True, slots=True)
class PendingLinear:
    """A stack of linears that is noted but not loaded. A `Linear`."""

    shape: tuple[int, int]
    modules: tuple[str, ...]
    biases: tuple[np.ndarray | None, ...]

    @property
    def nbytes(self) -> int:
        return 0

    def parts(self, weights: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
        """Module, weight and bias of each linear."""
        return zip(self.modules, weights, self.biases, strict=True)


@dataclass(eq=False)
class QuantizingBackend:
    """A `Backend` that quantises the linears named in `modules` as they are used, for one forward pass."""

    inner: Backend
    another: Callable[[], Backend]
    """makes a backend with the same memory"""
    modules: frozenset[str]
    """names of the linears to quantise; all parts of a stack or none"""
    read_weight: Callable[[str], np.ndarray]
    """float32 [N, K] of a linear, at the precision of the original checkpoint"""
    token_weights: np.ndarray
    """float32 [T]: one for each row of the quantised half"""
    sink: Callable[[QuantizedLinear], None]
    kv_scales: list[KVScales] = field(default_factory=list)
    """of the layers that ran, in order"""
    seen: set[str] = field(default_factory=set)
    """linears that were quantised"""

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self.activation_dtype = self.inner.activation_dtype
        self.runs_ahead = self.inner.runs_ahead
        self._limits: StepLimits | None = None

    def load_linear(self, parts: Sequence[LinearSource]) -> Linear:
        if all(part.name in self.modules for part in parts):
            shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
            return PendingLinear(shape, tuple(p.name for p in parts), tuple(p.bias for p in parts))
        return self.inner.load_linear(parts)

    def linear(self, x: Tensor, weight: Linear, *, out: Tensor) -> None:
        if not isinstance(weight, PendingLinear):
            self.inner.linear(x, weight, out=out)
            return
        tokens = len(self.token_weights)
        inputs = self._floats(x)
        moments = Moments.of(inputs[:tokens], inputs[tokens:], self.token_weights)
        del inputs
        weights = [self.read_weight(module) for module in weight.modules]
        self._multiply(x, [_bfloat16_source(*part) for part in weight.parts(weights)], out)
        quantized = self._quantize(weight, weights, moments)
        self._multiply(x.rows(tokens), quantized, out.rows(tokens))

    def rope_and_store_kv(self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec) -> None:
        self.inner.rope_and_store_kv(qkv, inputs, kv, spec)
        slots = inputs.host.slot_mapping[: len(self.token_weights)]
        amax = [
            float(np.abs(self._floats(cache).reshape(-1, *cache.shape[2:])[slots]).max(initial=0.0))
            for cache in (kv.key, kv.value)
        ]
        self.kv_scales.append(KVScales.of_amax(*amax))

    def _multiply(self, x: Tensor, parts: Sequence[LinearSource], out: Tensor) -> None:
        """One product with a linear that is gone afterwards, by a backend that reserves its scratch."""
        assert self._limits is not None, "reserve() comes before linear()"
        backend = self.another()
        try:
            with memory_scope("weights/calibration"):
                linear = backend.load_linear(parts)
            backend.reserve(self._limits)
            backend.linear(x, linear, out=out)
        finally:
            backend.close()

    def _quantize(
        self, linear: PendingLinear, weights: Sequence[np.ndarray], moments: Moments
    ) -> list[LinearSource]:
        """Quantise a stack and hand it to the sink. The parts share the global scale."""
        stacked = np.concatenate(weights)
        global_scale = HEADROOM * amax_global_scale(stacked)
        if stacked.shape[1] > MAX_FEEDBACK_FEATURES:
            importance = np.diag(moments.quantized).astype(np.float32)
            done = quantize(stacked, global_scale=global_scale, importance=importance)
        else:
            done = quantize_with_feedback(stacked, moments.quantized, global_scale, cross=moments.cross)
        sources = []
        first = 0
        for module, original, bias in linear.parts(weights):
            rows = slice(first, first + len(original))
            first += len(original)
            weight = NVFP4Weight(done.codes[rows], done.group_scales[rows], global_scale)
            self.sink(QuantizedLinear(module, weight, moments.amax))
            self.seen.add(module)
            sources.append(_nvfp4_source(module, weight, bias))
        return sources

    def _floats(self, tensor: Tensor) -> np.ndarray:
        values = self.inner.to_host(tensor)
        return bfloat16_to_float32(values) if tensor.dtype is DType.BFLOAT16 else values

    # -- everything else as it is ------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        return self.inner.empty(shape, dtype)

    def from_host(self, array: np.ndarray, dtype: DType) -> Tensor:
        return self.inner.from_host(array, dtype)

    def to_host(self, tensor: Tensor) -> np.ndarray:
        return self.inner.to_host(tensor)

    def as_table(self, linear: Linear) -> Tensor:
        return self.inner.as_table(linear)

    def reserve(self, limits: StepLimits) -> None:
        self._limits = limits
        self.inner.reserve(limits)

    def close(self) -> None:
        self.inner.close()

    def prepare(self, batch: StepBatch) -> StepInputs:
        return self.inner.prepare(batch)

    def run(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> Tensor:
        return forward(inputs)

    def embedding(self, token_ids: Tensor, table: Tensor, *, out: Tensor) -> None:
        self.inner.embedding(token_ids, table, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        self.inner.rms_norm(x, weight, eps, out=out)

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, out: Tensor
    ) -> None:
        self.inner.add_rms_norm(residual, delta, weight, eps, out=out)

    def attention(
        self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec, *, out: Tensor
    ) -> None:
        self.inner.attention(qkv, inputs, kv, spec, out=out)

    def silu_and_mul(self, gate_up: Tensor, *, out: Tensor) -> None:
        self.inner.silu_and_mul(gate_up, out=out)

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        self.inner.gather_rows(x, rows, out=out)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> PendingTokens:
        return self.inner.sample(logits, rows)

    def synchronize(self) -> None:
        self.inner.synchronize()


def _bfloat16_source(module: str, weight: np.ndarray, bias: np.ndarray | None) -> LinearSource:
    rows, columns = weight.shape
    bits = weight.astype(ml_dtypes.bfloat16).view(np.uint16)
    return LinearSource(module, WeightFormat.BF16, (rows, columns), bits, bias=bias)


def _nvfp4_source(module: str, weight: NVFP4Weight, bias: np.ndarray | None) -> LinearSource:
    return LinearSource(
        name=module,
        format=WeightFormat.NVFP4,
        shape=weight.shape,
        weight=weight.codes,
        group_scales=weight.group_scales,
        global_scale=weight.global_scale,
        bias=bias,
    )


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Values of bfloat16 numbers in their uint16 carrier."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
