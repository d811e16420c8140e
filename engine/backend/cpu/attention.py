"""Attention over the paged cache: a step's tokens are dealt to the kernels that suit them."""

from __future__ import annotations

import numpy as np

from engine.backend.cpu import attention_prefill
from engine.backend.cpu.attention_decode import (
    count_chunks,
    decode,
    decode_parallel,
    partial_shape,
    scratch_floats,
)
from engine.backend.cpu.attention_past import Past
from engine.backend.cpu.attention_prefill import prefill_parallel
from engine.backend.cpu.inputs import HostStepInputs
from engine.backend.cpu.layout import PARTIALS, SCRATCH_FLOATS
from engine.backend.cpu.registers import LANES
from engine.backend.cpu.tensor import array_of
from engine.backend.protocol import AttentionSpec, DType, KVLayer
from engine.errors import EngineError

__all__ = ["Attention"]

_TILE_ROWS = 192
_SERIAL_WORK = 1 << 17
"""Multiplications below which one thread decodes: some 20 µs."""


class Attention:
    """The operation, and memory for what parts of it leave to each other.

    Parameters
    ----------
    scratch
        float32 [threads, at least `SCRATCH_FLOATS`]. It runs on as many threads as that has rows.
    partials
        float32 [`PARTIALS`].
    """

    def __init__(self, scratch: np.ndarray, partials: np.ndarray) -> None:
        self._scratch = scratch
        self._partials = partials

    def __call__(
        self, qkv: np.ndarray, inputs: HostStepInputs, kv: KVLayer, spec: AttentionSpec, out: np.ndarray
    ) -> None:
        """Causal attention of q in `qkv`, float32 [T, (heads + 2 kv_heads) * D], to out [T, heads * D].

        Raises
        ------
        EngineError
            Heads are too large for the scratch.
        """
        scaled = kv.key.dtype is DType.FLOAT8_E4M3
        past = Past(
            positions=array_of(inputs.positions),
            tables=array_of(inputs.block_tables),
            keys=array_of(kv.key),
            values=array_of(kv.value),
            value_scale=kv.value_scale if scaled else 1.0,
            num_heads=spec.num_heads,
            factor=spec.scale * kv.key_scale if scaled else spec.scale,
            window=spec.sliding_window or 0,
        )
        if inputs.decode_tokens.size:
            self._decode(qkv, inputs, spec, past, out)
        if inputs.prefill_sequences.size:
            starts, sequences = array_of(inputs.query_start), inputs.prefill_sequences
            prefill_parallel(qkv, past, starts, sequences, _tile_rows(spec), self._scratch, out)

    def _decode(
        self, qkv: np.ndarray, inputs: HostStepInputs, spec: AttentionSpec, past: Past, out: np.ndarray
    ) -> None:
        tokens, sequences = inputs.decode_tokens, inputs.decode_sequences
        threads = len(self._scratch)
        if scratch_floats(spec.num_heads, spec.num_kv_heads, spec.head_dim) > SCRATCH_FLOATS:
            raise _too_large(spec)
        if threads == 1 or inputs.decode_context * spec.num_heads * spec.head_dim < _SERIAL_WORK:
            decode(0, 1, qkv, past, tokens, sequences, self._scratch[0], self._partials, False, out)
            return
        # Few tokens would not keep all threads busy; their pasts do, if what the chunks leave can be kept.
        split = tokens.size < 4 * threads
        if split:
            chunks = count_chunks(past.positions, tokens, past.window)
            heads, width = partial_shape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
            split = chunks * heads * width <= PARTIALS
        decode_parallel(qkv, past, tokens, sequences, self._scratch, self._partials, split, out)


def _tile_rows(spec: AttentionSpec) -> int:
    fixed = attention_prefill.scratch_floats(0, spec.head_dim)
    each = attention_prefill.scratch_floats(1, spec.head_dim) - fixed
    rows = min(_TILE_ROWS, (SCRATCH_FLOATS - fixed) // each // LANES * LANES)
    if rows <= 0:
        raise _too_large(spec)
    return rows


def _too_large(spec: AttentionSpec) -> EngineError:
    return EngineError(
        f"attention of {spec.num_heads} heads of {spec.head_dim} over {spec.num_kv_heads}: "
        f"more than the CPU backend's scratch of {SCRATCH_FLOATS} floats"
    )
