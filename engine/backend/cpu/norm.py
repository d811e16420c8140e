"""RMS norm (Zhang & Sennrich 2019) over rows."""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.jit import kernel
from engine.backend.cpu.reductions import sum_of_squares

__all__ = ["add_rms_norm", "add_rms_norm_parallel", "rms_norm"]


@kernel()
def normalise(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """One row: ``out = x / sqrt(mean(x²) + eps) * weight``. `out` may be `x`."""
    factor = float32(1.0) / math.sqrt(sum_of_squares(x) / float32(x.size) + float32(eps))
    for i in range(x.size):
        out[i] = x[i] * factor * weight[i]


@kernel()
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """``out = x / sqrt(mean(x²) + eps) * weight``; float32 [T, H], weight [H]. `out` may be `x`."""
    for t in range(x.shape[0]):
        normalise(x[t], weight, eps, out[t])


@kernel()
def add_rms_norm(
    residual: np.ndarray, delta: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray
) -> None:
    """``residual += delta``, then ``out = rms_norm(residual)``; float32 [T, H]. `out` may be `delta`."""
    for t in range(residual.shape[0]):
        row, addend = residual[t], delta[t]
        for i in range(row.size):
            row[i] += addend[i]
        normalise(row, weight, eps, out[t])


@kernel(parallel=True)
def add_rms_norm_parallel(
    residual: np.ndarray, delta: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, parts: int
) -> None:
    """`add_rms_norm` with the rows in `parts`."""
    rows = residual.shape[0]
    for part in prange(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        add_rms_norm(residual[first:last], delta[first:last], weight, eps, out[first:last])
