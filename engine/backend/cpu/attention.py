"""Attention over the paged cache: a step's tokens are dealt to the kernels that suit them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.backend.cpu import attention_decode, attention_prefill
from engine.backend.cpu.inputs import HostStepInputs
from engine.backend.cpu.tensor import HostTensor, array_of
from engine.backend.protocol import AttentionSpec, DType, KVLayer
from engine.errors import EngineError
from engine.memory.scope import memory_scope

__all__ = ["SCRATCH_FLOATS", "Attention"]

SCRATCH_FLOATS = 1 << 18
"""scratch for each thread: room for a tile of queries, keys, values and scores"""
_PARTIALS = 1 << 20
"""floats for what chunks of the past leave behind; they are only touched as far as a step needs"""
_TILE_ROWS = 128
_SERIAL_WORK = 1 << 16
"""Multiplications below which waking another thread takes longer than the work."""


class Attention:
    """The operation, and memory for what parts of it leave to each other.

    Parameters
    ----------
    scratch
        float32 [threads, at least `SCRATCH_FLOATS`]. It runs on as many threads as that has rows.
    allocate
        Makes a tensor of a shape and dtype.
    """

    def __init__(self, scratch: np.ndarray, allocate: Callable[[tuple[int, ...], DType], HostTensor]) -> None:
        self._scratch = scratch
        with memory_scope("workspace/attention.partials"):
            self._partials = allocate((_PARTIALS,), DType.FLOAT32).array

    def __call__(
        self, qkv: np.ndarray, inputs: HostStepInputs, kv: KVLayer, spec: AttentionSpec, out: np.ndarray
    ) -> None:
        """Causal attention of q in `qkv`, float32 [T, (heads + 2 kv_heads) * D], to out [T, heads * D].

        Raises
        ------
        EngineError
            Heads are too large for the scratch.
        """
        window = spec.sliding_window or 0
        factor = spec.scale * kv.key_scale if kv.key.dtype is DType.FLOAT8_E4M3 else spec.scale
        value_scale = kv.value_scale if kv.value.dtype is DType.FLOAT8_E4M3 else 1.0
        keys, values = array_of(kv.key), array_of(kv.value)
        positions, tables = array_of(inputs.positions), array_of(inputs.block_tables)
        if inputs.decode_tokens.size:
            self._decode(qkv, inputs, spec, keys, values, positions, tables, factor, value_scale, window, out)
        if inputs.prefill_sequences.size:
            rows = self._tile_rows(spec)
            attention_prefill.prefill_parallel(
                qkv,
                positions,
                array_of(inputs.query_start),
                inputs.prefill_sequences,
                tables,
                keys,
                values,
                value_scale,
                spec.num_heads,
                factor,
                window,
                rows,
                self._scratch,
                out,
            )

    def _decode(
        self,
        qkv: np.ndarray,
        inputs: HostStepInputs,
        spec: AttentionSpec,
        keys: np.ndarray,
        values: np.ndarray,
        positions: np.ndarray,
        tables: np.ndarray,
        factor: float,
        value_scale: float,
        window: int,
        out: np.ndarray,
    ) -> None:
        heads, threads, tokens = spec.num_heads, len(self._scratch), inputs.decode_tokens
        if attention_decode.scratch_floats(heads, spec.num_kv_heads, spec.head_dim) > SCRATCH_FLOATS:
            raise _too_large(spec)
        arguments = (
            qkv,
            positions,
            tokens,
            inputs.decode_sequences,
            tables,
            keys,
            values,
            value_scale,
            heads,
            factor,
            window,
        )
        if threads == 1 or inputs.decode_context * heads * spec.head_dim < _SERIAL_WORK:
            attention_decode.decode(0, 1, *arguments, self._scratch[0], self._partials, False, out)
            return
        # Few tokens would not keep all threads busy; their pasts do, if what the chunks leave behind can be
        # kept.
        split = tokens.size < 4 * threads
        if split:
            chunks = attention_decode.count_chunks(positions, tokens, window)
            split = chunks * attention_decode.partial_floats(heads, spec.head_dim) <= _PARTIALS
        attention_decode.decode_parallel(*arguments, self._scratch, self._partials, split, out)

    @staticmethod
    def _tile_rows(spec: AttentionSpec) -> int:
        fixed = attention_prefill.scratch_floats(0, spec.head_dim)
        each = attention_prefill.scratch_floats(1, spec.head_dim) - fixed
        rows = min(_TILE_ROWS, (SCRATCH_FLOATS - fixed) // each // 4 * 4)
        if rows <= 0:
            raise _too_large(spec)
        return rows


def _too_large(spec: AttentionSpec) -> EngineError:
    return EngineError(
        f"attention of {spec.num_heads} heads of {spec.head_dim} over {spec.num_kv_heads}: "
        f"more than the CPU backend's scratch of {SCRATCH_FLOATS} floats"
    )
