"""Small products and reductions for the inside of a kernel, where BLAS cannot be called."""

from __future__ import annotations

import numpy as np
from numpy import float32, int32

from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import CONTRACT, REASSOCIATE, kernel

__all__ = ["accumulate_product", "add_weighted_rows", "dot", "exponentials", "largest"]


@kernel(fastmath=REASSOCIATE)
def dot(a: np.ndarray, b: np.ndarray) -> float32:
    """Sum of products of two float32 vectors of one length."""
    total = float32(0.0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel()
def largest(values: np.ndarray) -> float32:
    """The largest of float32 `values`, -inf of none. NaN is left out, or is the result.

    Compared as integers in the same order: a maximum of floats does not use vector registers, for NaN's sake.
    """
    peak = int32(-0x7F80_0001)  # -inf
    for i in range(values.size):
        bits = float32(values[i]).view(int32)
        # A negative float is the larger the smaller its magnitude.
        ordered = int32(bits ^ int32(int32(bits >> 31) & 0x7FFF_FFFF))
        peak = ordered if ordered > peak else peak
    return int32(peak ^ int32(int32(peak >> 31) & 0x7FFF_FFFF)).view(float32)


@kernel(fastmath=REASSOCIATE)
def exponentials(values: np.ndarray, peak: float32) -> float32:
    """``values = exp(values - peak)`` in place, for values up to `peak`; returns their sum. NaN stays NaN."""
    total = float32(0.0)
    for i in range(values.size):
        weight = exp(values[i] - peak)
        values[i] = weight
        total += weight
    return total


@kernel(fastmath=CONTRACT)
def accumulate_product(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, rows: int, depth: int, columns: int
) -> None:
    """``c[:rows, :columns] += a[:rows, :depth] @ b[:depth, :columns]``; float32, `depth` a multiple of 4.

    Each element is a chain of fused multiply-adds in the order of the depth, in whatever rows it is computed
    with: a row's result does not depend on its neighbours. Four rows and four steps at a time keep 16 factors
    in registers, which makes the multipliers and not the loads the limit.
    """
    whole = rows // 4 * 4
    for r in range(0, whole, 4):
        for k in range(0, depth, 4):
            a00, a01, a02, a03 = a[r, k], a[r, k + 1], a[r, k + 2], a[r, k + 3]
            a10, a11, a12, a13 = a[r + 1, k], a[r + 1, k + 1], a[r + 1, k + 2], a[r + 1, k + 3]
            a20, a21, a22, a23 = a[r + 2, k], a[r + 2, k + 1], a[r + 2, k + 2], a[r + 2, k + 3]
            a30, a31, a32, a33 = a[r + 3, k], a[r + 3, k + 1], a[r + 3, k + 2], a[r + 3, k + 3]
            for j in range(columns):
                b0, b1, b2, b3 = b[k, j], b[k + 1, j], b[k + 2, j], b[k + 3, j]
                c[r, j] = c[r, j] + a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                c[r + 1, j] = c[r + 1, j] + a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
                c[r + 2, j] = c[r + 2, j] + a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
                c[r + 3, j] = c[r + 3, j] + a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3
    for r in range(whole, rows):
        add_weighted_rows(a[r], b, 0, c[r], depth, columns)


@kernel(fastmath=CONTRACT)
def add_weighted_rows(
    weights: np.ndarray, b: np.ndarray, offset: int, c: np.ndarray, depth: int, columns: int
) -> None:
    """``c[:columns] += weights[:depth] @ b[:depth, offset:][:, :columns]``; `depth` a multiple of 4."""
    for k in range(0, depth, 4):
        a0, a1, a2, a3 = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
        # Cut out before the loop: an index with an offset might be negative, and numba would test each.
        b0, b1, b2, b3 = b[k, offset:], b[k + 1, offset:], b[k + 2, offset:], b[k + 3, offset:]
        for j in range(columns):
            c[j] = c[j] + a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
