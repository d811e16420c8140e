"""Embedding lookup, row gathering and the gated activation."""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.exponential import exp
from engine.backend.cpu.floats import decode_bf16
from engine.backend.cpu.jit import CONTRACT, kernel

__all__ = ["embedding", "gather_rows", "silu_and_mul", "silu_and_mul_parallel"]


@kernel()
def embedding(token_ids: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """``out[t] = table[token_ids[t]]``; table uint16 (bfloat16) [V, H], out float32 [T, H]."""
    for t in range(out.shape[0]):
        row = table[token_ids[t]]
        for i in range(out.shape[1]):
            out[t, i] = decode_bf16(row[i])


@kernel()
def gather_rows(x: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """``out[r] = x[rows[r]]``; float32 [T, H] to [R, H]."""
    for r in range(out.shape[0]):
        row = x[rows[r]]
        for i in range(out.shape[1]):
            out[r, i] = row[i]


@kernel(fastmath=CONTRACT)
def silu_and_mul(gate_up: np.ndarray, out: np.ndarray) -> None:
    """``out = gate / (1 + exp(-gate)) * up``; gate_up float32 [T, 2 I], gate first, out [T, I]."""
    features = out.shape[1]
    for t in range(out.shape[0]):
        gate, up = gate_up[t, :features], gate_up[t, features:]
        for i in range(features):
            out[t, i] = gate[i] / (float32(1.0) + exp(-gate[i])) * up[i]


@kernel(parallel=True)
def silu_and_mul_parallel(gate_up: np.ndarray, out: np.ndarray, parts: int) -> None:
    """`silu_and_mul` with the rows in `parts`."""
    for part in prange(parts):
        first, last = out.shape[0] * part // parts, out.shape[0] * (part + 1) // parts
        silu_and_mul(gate_up[first:last], out[first:last])
