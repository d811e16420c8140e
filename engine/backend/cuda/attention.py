"""Which attention kernels a step needs, and how its sequences are split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.tensor import CudaTensor, address_of
from engine.backend.protocol import AttentionSpec, DType, KVLayer, StepBatch, Tensor

if TYPE_CHECKING:
    from engine.backend.cuda.inputs import CudaStepInputs

KV_TYPES = {DType.FLOAT8_E4M3: 0, DType.BFLOAT16: 1, DType.FLOAT32: 2}
"""as the kernels number them"""
_TENSOR_CORE_CACHES = {DType.FLOAT8_E4M3: "fp8", DType.BFLOAT16: "bf16"}
_TENSOR_CORE_HEADS = (64, 128, 256)
_LARGEST_HEAD = 512
BLOCK_SIZE_MULTIPLE = 16
"""16 tokens of a cache block are read together"""
_DECODE_THREADS = 128
_DECODE_COLUMNS = 8
"""heads of a group that a decode block computes together"""
_DECODE_BLOCKS = 3
"""decode blocks that share a multiprocessor"""
_LEAST_SPLIT_TOKENS = 256
_MOST_SPLITS = 64
_PREFILL_ROWS = 128
_PREFILL_TOKENS = 64
_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a step's sequences ask for."""

    decodes: bool
    """some sequence has one query token"""
    longest_query: int
    longest_decode: int
    """tokens in the cache of the longest sequence with one query token"""

    @classmethod
    def of(cls, batch: StepBatch) -> AttentionPlan:
        queries = np.diff(batch.query_start)
        decoding = batch.seq_lens[queries == 1]
        return cls(
            decodes=decoding.size > 0,
            longest_query=int(queries.max(initial=0)),
            longest_decode=int(decoding.max(initial=0)),
        )


@lru_cache(maxsize=4096)
def decode_splits(blocks: int, length: int, multiprocessors: int, most: int) -> int:
    """Parts in which `blocks` blocks' sequences of up to `length` tokens are worked on.

    The number of rounds of blocks on the device, times the length of a part, is to be least.
    """
    slots = multiprocessors * _DECODE_BLOCKS
    candidates = range(1, max(1, min(most, length // _LEAST_SPLIT_TOKENS)) + 1)
    return min(
        candidates, key=lambda splits: (-(-blocks * splits // slots) / splits * (1 + 0.02 * splits), splits)
    )


def partial_bytes(multiprocessors: int) -> tuple[int, int]:
    """Bytes for partial results and for their softmax states that `decode_splits` is bounded by."""
    rows = multiprocessors * _DECODE_BLOCKS * 4 * _DECODE_COLUMNS
    return rows * 128 * 4, rows * 8


class AttentionOperation:
    """Launches the attention kernels."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._partial_out: CudaTensor | None = None
        self._partial_state: CudaTensor | None = None

    def reserve(self, partial_out: CudaTensor, partial_state: CudaTensor) -> None:
        """Scratch of `partial_bytes`."""
        self._partial_out, self._partial_state = partial_out, partial_state

    def __call__(
        self,
        qkv: Tensor,
        inputs: CudaStepInputs,
        kv: KVLayer,
        spec: AttentionSpec,
        out: Tensor,
        *,
        splits: int | None = None,
        tensor_cores: bool = True,
    ) -> None:
        """Attention of one layer.

        `splits` overrides the choice; without `tensor_cores` the plain kernel does it all.
        """
        if inputs.num_tokens == 0:
            return
        cache = _TENSOR_CORE_CACHES.get(kv.key.dtype)
        if not tensor_cores or cache is None or spec.head_dim not in _TENSOR_CORE_HEADS:
            self._any(qkv, inputs, kv, spec, out)
            return
        plan = inputs.attention
        if plan.decodes:
            self._decode(f"{cache}_{spec.head_dim}", qkv, inputs, kv, spec, out, splits)
        if plan.longest_query > 1:
            self._prefill(f"{cache}_{spec.head_dim}", qkv, inputs, kv, spec, out)

    def _decode(
        self,
        name: str,
        qkv: Tensor,
        inputs: CudaStepInputs,
        kv: KVLayer,
        spec: AttentionSpec,
        out: Tensor,
        splits: int | None,
    ) -> None:
        assert self._partial_out, "reserve() comes before attention()"
        assert self._partial_state
        sequences = len(inputs.host.seq_lens)
        group = spec.num_heads // spec.num_kv_heads
        blocks_y = spec.num_kv_heads * -(-group // _DECODE_COLUMNS)
        rows = sequences * spec.num_heads
        room = min(
            self._partial_out.nbytes // (rows * spec.head_dim * 4), self._partial_state.nbytes // (rows * 8)
        )
        visible = min(inputs.attention.longest_decode, spec.sliding_window or inputs.attention.longest_decode)
        if splits is None:
            most = max(1, min(room, _MOST_SPLITS))
            splits = decode_splits(blocks_y * sequences, visible, self._device.multiprocessors, most)
        assert splits == 1 or splits <= room, "partial results do not fit"
        self._device.launch(
            self._device.kernel("attention_decode", f"attention_decode_{name}"),
            (splits, blocks_y, sequences),
            _DECODE_THREADS,
            *_common(qkv, inputs, kv, spec, out),
            self._partial_out.address,
            self._partial_state.address,
            rows,
        )
        if splits > 1:
            self._device.launch(
                self._device.kernel("attention_decode", "attention_combine"),
                (spec.num_heads, sequences),
                spec.head_dim,
                address_of(inputs.query_start),
                self._partial_out.address,
                self._partial_state.address,
                rows,
                splits,
                spec.num_heads,
                np.float32(_out_scale(kv)),
                address_of(out),
            )

    def _prefill(
        self, name: str, qkv: Tensor, inputs: CudaStepInputs, kv: KVLayer, spec: AttentionSpec, out: Tensor
    ) -> None:
        shared_bytes = 2 * _PREFILL_TOKENS * (spec.head_dim + 8) * 2
        tile_tokens = _PREFILL_ROWS // (spec.num_heads // spec.num_kv_heads)
        self._device.launch(
            self._device.kernel("attention_prefill", f"attention_prefill_{name}", shared_bytes=shared_bytes),
            (-(-inputs.attention.longest_query // tile_tokens), spec.num_kv_heads, len(inputs.host.seq_lens)),
            2 * _PREFILL_ROWS,
            *_common(qkv, inputs, kv, spec, out),
            shared_bytes=shared_bytes,
        )

    def _any(
        self, qkv: Tensor, inputs: CudaStepInputs, kv: KVLayer, spec: AttentionSpec, out: Tensor
    ) -> None:
        assert spec.head_dim <= _LARGEST_HEAD, f"heads of {spec.head_dim} are larger than {_LARGEST_HEAD}"
        self._device.launch(
            self._device.kernel("attention_any", "attention_any"),
            (inputs.num_tokens, -(-spec.num_heads // 4)),
            128,
            address_of(qkv),
            address_of(kv.key),
            address_of(kv.value),
            address_of(inputs.query_start),
            address_of(inputs.seq_lens),
            address_of(inputs.block_tables),
            len(inputs.host.seq_lens),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            kv.block_size,
            inputs.block_tables.shape[1],
            spec.sliding_window or 0,
            np.float32(_score_scale(kv, spec)),
            np.float32(_out_scale(kv)),
            KV_TYPES[kv.key.dtype],
            address_of(out),
        )


def _score_scale(kv: KVLayer, spec: AttentionSpec) -> float:
    """Softmax scale to base 2, with the scale of stored keys."""
    return spec.scale * _LOG2E * (kv.key_scale if kv.key.dtype is DType.FLOAT8_E4M3 else 1.0)


def _out_scale(kv: KVLayer) -> float:
    return kv.value_scale if kv.value.dtype is DType.FLOAT8_E4M3 else 1.0


def _common(
    qkv: Tensor, inputs: CudaStepInputs, kv: KVLayer, spec: AttentionSpec, out: Tensor
) -> tuple[int | np.float32, ...]:
    """Arguments that the decode and prefill kernels begin with."""
    return (
        address_of(qkv),
        address_of(kv.key),
        address_of(kv.value),
        address_of(inputs.query_start),
        address_of(inputs.seq_lens),
        address_of(inputs.block_tables),
        spec.num_heads,
        spec.num_kv_heads,
        kv.block_size,
        inputs.block_tables.shape[1],
        spec.sliding_window or 0,
        np.float32(_score_scale(kv, spec)),
        np.float32(_out_scale(kv)),
        address_of(out),
    )
