"""Reductions over one row.

Their order is written down, in vector registers. Left to the compiler, it may differ between the kernels that
a reduction is inlined into, and with it a token's last bits between one thread and many.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, int32

from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import CONTRACT, kernel
from engine.backend.cpu.registers import LANES, add, load, load_first, multiply_add, total, zero

__all__ = ["exponentials", "largest", "sum_of_squares"]


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


@kernel()
def sum_of_squares(values: np.ndarray) -> float32:
    """Of float32 `values`, lane by lane of four registers in turn, then across registers and lanes."""
    # An addition waits for the one before it, and the next four values need not.
    a, b, c, d = zero(), zero(), zero(), zero()
    whole = values.size // LANES * LANES
    turns = values.size // (4 * LANES) * (4 * LANES)
    for i in range(0, turns, 4 * LANES):
        one, two = load(values, i), load(values, i + LANES)
        three, four = load(values, i + 2 * LANES), load(values, i + 3 * LANES)
        a, b = multiply_add(one, one, a), multiply_add(two, two, b)
        c, d = multiply_add(three, three, c), multiply_add(four, four, d)
    sums = add(add(a, b), add(c, d))
    for i in range(turns, whole, LANES):
        register = load(values, i)
        sums = multiply_add(register, register, sums)
    if whole < values.size:
        register = load_first(values, whole, values.size - whole)
        sums = multiply_add(register, register, sums)
    result: float32 = total(sums)
    return result


@kernel(fastmath=CONTRACT)
def exponentials(values: np.ndarray, peak: float32) -> float32:
    """``values = exp(values - peak)`` in place, for values up to `peak`; returns their sum. NaN stays NaN."""
    for i in range(values.size):
        values[i] = exp(values[i] - peak)
    sums = zero()
    whole = values.size // LANES * LANES
    for i in range(0, whole, LANES):
        sums = add(sums, load(values, i))
    if whole < values.size:
        sums = add(sums, load_first(values, whole, values.size - whole))
    result: float32 = total(sums)
    return result
