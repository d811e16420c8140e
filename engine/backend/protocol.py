"""What a device must be able to do to run a model: the `Backend` protocol and the types that cross it.

Models are written against this module and nothing else. A backend keeps no reference to a model, a request
or a scheduler; it is handed its memory resource when it is built and asks for every byte through it.

Outputs are always given by the caller (``out=``) and live in memory allocated at start-up, so that a step
allocates nothing and a captured graph sees stable addresses.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

if TYPE_CHECKING:
    from cuda.core import Buffer

    from engine.sampler import PendingTokens, SamplingRow


class DType(enum.Enum):
    """Element types in device memory, with their NumPy carrier (16- and 8-bit floats travel as unsigned
    integers).
    """

    FLOAT32 = ("float32", 4, np.float32)
    BFLOAT16 = ("bfloat16", 2, np.uint16)
    FLOAT8_E4M3 = ("float8_e4m3", 1, np.uint8)
    UINT8 = ("uint8", 1, np.uint8)
    INT32 = ("int32", 4, np.int32)
    INT64 = ("int64", 8, np.int64)

    def __init__(self, label: str, itemsize: int, carrier: type[np.generic]) -> None:
        self.label = label
        self.itemsize = itemsize
        self.carrier = carrier


@dataclass(slots=True, eq=False)
class Tensor:
    """A dense row-major array at the start of a buffer that came from the injected memory resource.

    Backends subclass it to keep what they need beside it (the CPU backend: a NumPy view of the same bytes).
    """

    buffer: Buffer
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, count: int) -> Self:
        """The first `count` rows, sharing the buffer. Raises ValueError if there are fewer."""
        if count > self.shape[0]:
            raise ValueError(f"tensor of {self.shape[0]} rows has no first {count}")
        return replace(self, shape=(count, *self.shape[1:]))


class WeightFormat(enum.Enum):
    """How a linear layer's weight is stored in a checkpoint."""

    NVFP4 = "nvfp4"
    FP8 = "fp8"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, eq=False)
class LinearSource:
    """One linear layer as a checkpoint holds it: NumPy views of the mapped file, nothing copied.

    ======  ===========================  ============================  =====================
    format  weight                       group_scales                  global_scale
    ======  ===========================  ============================  =====================
    NVFP4   uint8 [N, K/2], even K low   uint8 (E4M3) [N, K/16]        multiplier, fp32
    FP8     uint8 (E4M3) [N, K]          None                          multiplier, fp32
    BF16    uint16 (bfloat16) [N, K]     None                          1.0
    ======  ===========================  ============================  =====================

    The value of an element is ``e2m1(code) * e4m3(group_scale) * global_scale`` (NVFP4), ``e4m3(w) *
    global_scale`` (FP8). `global_scale` is always a multiplier, whatever the checkpoint's own convention.
    `bias` is float32 [N].
    """

    name: str
    format: WeightFormat
    shape: tuple[int, int]
    weight: np.ndarray
    group_scales: np.ndarray | None = None
    global_scale: float = 1.0
    bias: np.ndarray | None = None


class Linear(Protocol):
    """A linear layer resident on the device, in whatever layout the backend is fastest with."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): output and input features."""

    @property
    def nbytes(self) -> int:
        """Resident bytes, scales and bias included."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that will ever be asked for; everything a step needs is allocated from it at
    start-up.
    """

    max_tokens: int
    max_seqs: int
    max_blocks_per_seq: int
    max_logits_rows: int
    """Rows of logits in one step: at least `max_seqs`."""
    vocab_size: int
    block_size: int


@dataclass(slots=True, eq=False)
class StepBatch:
    """One step's inputs on the host. T tokens of S sequences, flattened; R rows want logits."""

    token_ids: np.ndarray
    """int32 [T]"""
    positions: np.ndarray
    """int32 [T]: position of each token in its sequence"""
    slot_mapping: np.ndarray
    """int64 [T]: block * block_size + offset where the token's K and V are stored"""
    query_start: np.ndarray
    """int32 [S+1]: sequence s owns tokens query_start[s]:query_start[s+1]"""
    seq_lens: np.ndarray
    """int32 [S]: tokens of the sequence in the cache once this step's are stored"""
    block_tables: np.ndarray
    """int32 [S, B]: physical blocks of each sequence; entries past its length are unread"""
    logits_rows: np.ndarray
    """int32 [R]: which of the T tokens want logits"""


@dataclass(slots=True, eq=False)
class StepInputs:
    """A `StepBatch` where the backend can read it (io memory allocated by `Backend.reserve`), plus the
    host original.
    """

    host: StepBatch
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.host.token_ids)

    @property
    def num_logits_rows(self) -> int:
        return len(self.host.logits_rows)


@dataclass(slots=True, eq=False)
class KVLayer:
    """One attention layer's paged cache. Stored value: ``e4m3(saturate(x / scale))`` for FP8, bfloat16
    otherwise.
    """

    key: Tensor
    """[blocks, block_size, kv_heads, head_dim], FLOAT8_E4M3 or BFLOAT16 (or FLOAT32, for reference runs)"""
    value: Tensor
    """like `key`"""
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def block_size(self) -> int:
        return self.key.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Shape of one attention layer and its rotary embedding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """multiplies q·k, usually head_dim ** -0.5"""
    inv_freq: Tensor
    """float32 [head_dim / 2], scaling (llama3, linear, …) applied"""
    rope_magnitude: float = 1.0
    """multiplies cos and sin (YaRN's attention factor)"""
    sliding_window: int | None = None
    """a token sees itself and this many - 1 tokens before it"""
    q_norm: Tensor | None = None
    """float32 [head_dim]: RMS norm per head before RoPE (Qwen3)"""
    k_norm: Tensor | None = None
    norm_eps: float = field(default=1e-6)


class Backend(Protocol):
    """A device that can run a model. Activations are FLOAT32 on the CPU and 16-bit on CUDA
    (`activation_dtype`).
    """

    name: str
    """``"cpu"`` or ``"cuda"``"""
    activation_dtype: DType

    @property
    def runs_ahead(self) -> bool:
        """A step's operations are queued in little time, and run while the host does something else."""

    # -- memory --------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised tensor from the injected resource, tagged by the current memory scope."""

    def from_host(self, array: np.ndarray, dtype: DType) -> Tensor:
        """Copy of `array` on the device; `array` holds `dtype`'s values in its NumPy carrier."""

    def to_host(self, tensor: Tensor) -> np.ndarray:
        """Copy on the host in `dtype`'s NumPy carrier."""

    def load_linear(self, parts: Sequence[LinearSource]) -> Linear:
        """One resident linear out of parts stacked along N (q, k, v; gate, up). Each part keeps its own
        global scale.

        Scratch is allocated under the scope ``repack/<the current tag without its first segment>`` and
        freed before this returns. Parts of different formats or any N and K are accepted.
        """

    def as_table(self, linear: Linear) -> Tensor:
        """The BF16 linear's own bytes as an embedding table [N, K]: tied embeddings share one buffer."""

    def reserve(self, limits: StepLimits) -> None:
        """Allocate what steps up to `limits` need: io buffers and kernel scratch. Called once, after the
        weights.
        """

    def close(self) -> None:
        """Give back what the backend itself holds. Idempotent."""

    # -- one step ------------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> StepInputs:
        """Put the step's inputs where the operations read them."""

    def run(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> Tensor:
        """``forward(inputs)``: all of a step's operations between its inputs and its logits.

        A backend may keep what `forward` does, and do the same again for later inputs of the same shapes: so
        it must do nothing but call operations, and only by `inputs`' shapes may it choose between them. It
        is one object, the same in each step.
        """

    def embedding(self, token_ids: Tensor, table: Tensor, *, out: Tensor) -> None:
        """``out[t] = table[token_ids[t]]``; table BFLOAT16 [V, H], out [T, H]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """``out = x / sqrt(mean(x²) + eps) * weight`` over the last axis (Zhang & Sennrich 2019); weight
        float32.
        """

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, out: Tensor
    ) -> None:
        """``residual += delta`` in place, then ``out = rms_norm(residual)``."""

    def linear(self, x: Tensor, weight: Linear, *, out: Tensor) -> None:
        """``out = x @ W.T + bias``, FP32 accumulation. x [T, K], out [T, N]."""

    def rope_and_store_kv(self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec) -> None:
        """Norm q and k per head where the spec asks, rotate them (rotate-half), store k and v in the paged
        cache.

        qkv [T, (heads + 2 kv_heads) * head_dim]; the q part is rotated in place; the k and v parts may be
        clobbered.
        """

    def attention(
        self, qkv: Tensor, inputs: StepInputs, kv: KVLayer, spec: AttentionSpec, *, out: Tensor
    ) -> None:
        """Causal attention of the q part of `qkv` over the paged cache. out [T, heads * head_dim]. FP32
        accumulation.
        """

    def silu_and_mul(self, gate_up: Tensor, *, out: Tensor) -> None:
        """``out = silu(gate_up[:, :I]) * gate_up[:, I:]``; gate_up [T, 2I]."""

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """``out[r] = x[rows[r]]``."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> PendingTokens:
        """Choose a token for each row of `logits` (float32 [R, V], may be overwritten).

        They are waited for before the next step's tokens are asked for.
        """

    def synchronize(self) -> None:
        """Wait for the device. Raises the device's error, if it has one."""
