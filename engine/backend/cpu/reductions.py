"""Reductions over one row of scores."""

from __future__ import annotations

import numpy as np
from numpy import float32, int32

from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import REASSOCIATE, kernel

__all__ = ["exponentials", "largest"]


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
