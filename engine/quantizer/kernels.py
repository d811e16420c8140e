"""Compiled loops of the quantiser.

All in one file: numba keeps machine code on disk and notices a changed source only in the kernel's own file.

Arrays are K-major ([K, N], the transpose of a checkpoint's [N, K]): the rows of a weight, which do not depend
on each other, are then the vector lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

__all__ = ["descend_group", "encode_e2m1", "quantize_group", "subtract_product"]

_LANES = 32  # two AVX-512 or four AVX2 registers of float32
# No reassociation: `_round_e2m1` adds and subtracts a constant to round.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "fastmath": {"contract", "nnan", "ninf", "nsz"},
    "error_model": "numpy",  # no check for a division by zero between the lanes
}


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile, without the interpreter's lock; keep the code on disk where there is a place for it.

    One thread: a group takes microseconds, less than it takes to wake a second one. Callers split rows.
    """
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # neither beside the source nor in the user's cache directory
        return njit(**_OPTIONS)(function)


@njit(inline="always")
def _round_e2m1(x):  # type: ignore[no-untyped-def]
    """Nearest E2M1 number, ties to the even code, saturating at 6."""
    magnitude = min(abs(x), np.float32(6.0))
    step = np.float32(2.0)
    inverse = np.float32(0.5)
    if magnitude < np.float32(4.0):
        step = np.float32(1.0)
        inverse = np.float32(1.0)
    if magnitude < np.float32(2.0):
        step = np.float32(0.5)
        inverse = np.float32(2.0)
    # 1.5 · 2²³: adding it leaves no bits for a fraction, so that the sum is rounded to a whole number.
    rounded = ((magnitude * inverse + np.float32(12582912.0)) - np.float32(12582912.0)) * step
    return rounded if x >= np.float32(0.0) else -rounded


@njit(inline="always")
def _nearest_e4m3(value, e4m3):  # type: ignore[no-untyped-def]
    """Code of the E4M3 number nearest to a value that is not negative."""
    low, high = 0, 126
    while low < high:
        middle = (low + high + 1) // 2
        if e4m3[middle] <= value:
            low = middle
        else:
            high = middle - 1
    if low < 126 and value - e4m3[low] > e4m3[low + 1] - value:
        low += 1
    return low


@_kernel
def quantize_group(  # type: ignore[no-untyped-def]
    weight, group, factor, e4m3, first, last, feedback, quantized, scales, errors
):
    rows = weight.shape[1]
    start = group * 16
    for block in range((rows + _LANES - 1) // _LANES):
        r0 = block * _LANES
        lanes = min(_LANES, rows - r0)
        w = np.zeros((16, _LANES), np.float32)
        t = np.empty((16, _LANES), np.float32)
        q = np.empty((16, _LANES), np.float32)
        e = np.empty((16, _LANES), np.float32)
        best_q = np.zeros((16, _LANES), np.float32)
        best_e = np.zeros((16, _LANES), np.float32)
        best = np.full(_LANES, np.float32(3e38))
        best_code = np.zeros(_LANES, np.uint8)
        loss = np.empty(_LANES, np.float32)
        scale = np.ones(_LANES, np.float32)
        inverse = np.ones(_LANES, np.float32)
        amax = np.zeros(_LANES, np.float32)
        centre = np.ones(_LANES, np.int64)
        for i in range(16):
            for n in range(lanes):
                w[i, n] = weight[start + i, r0 + n]
            for n in range(_LANES):
                amax[n] = max(amax[n], abs(w[i, n]))
        for n in range(lanes):
            centre[n] = _nearest_e4m3(amax[n] / np.float32(6.0), e4m3)
        for step in range(first, last + 1):
            for n in range(lanes):
                code = min(126, max(1, centre[n] + step))
                scale[n] = e4m3[code]
                inverse[n] = np.float32(1.0) / scale[n]
            for n in range(_LANES):
                loss[n] = np.float32(0.0)
            for i in range(16):
                for n in range(_LANES):
                    t[i, n] = w[i, n]
            for i in range(16):
                weight_of_error = np.float32(1.0) / factor[i, i]
                for n in range(_LANES):
                    value = _round_e2m1(t[i, n] * inverse[n]) * scale[n]
                    error = (t[i, n] - value) * weight_of_error
                    loss[n] += error * error
                    q[i, n] = value
                    e[i, n] = error
                if feedback:
                    for k in range(i + 1, 16):
                        f = factor[i, k]
                        for n in range(_LANES):
                            t[k, n] -= e[i, n] * f
            for n in range(_LANES):
                if loss[n] < best[n]:
                    best[n] = loss[n]
                    best_code[n] = min(126, max(1, centre[n] + step))
                    for i in range(16):
                        best_q[i, n] = q[i, n]
                        best_e[i, n] = e[i, n]
        for i in range(16):
            for n in range(lanes):
                quantized[start + i, r0 + n] = best_q[i, n]
                errors[i, r0 + n] = best_e[i, n]
        for n in range(lanes):
            scales[group, r0 + n] = best_code[n]


@_kernel
def encode_e2m1(quantized, step, codes):  # type: ignore[no-untyped-def]
    columns, rows = quantized.shape
    for k in range(columns):
        for n in range(rows):
            value = _round_e2m1(quantized[k, n] / step[k // 16, n])
            magnitude = abs(value)
            code = np.uint8(magnitude * np.float32(2.0)) if magnitude <= np.float32(2.0) else np.uint8(
                magnitude + np.float32(2.0) if magnitude <= np.float32(4.0) else np.float32(7.0)
            )  # fmt: skip
            codes[k, n] = code | np.uint8(8) if value < np.float32(0.0) else code


@_kernel
def descend_group(  # type: ignore[no-untyped-def]
    gradient, hessian, group, e4m3, values, scales, delta
):
    """Best codes of one group for its scale and the two beside it, others fixed; `delta` [16, N] is the
    change.

    A change d of the group's values changes the loss by ``dᵀ H d - 2 dᵀ g``, g being H times the present
    error.
    """
    rows = gradient.shape[1]
    start = group * 16
    for block in range((rows + _LANES - 1) // _LANES):
        r0 = block * _LANES
        lanes = min(_LANES, rows - r0)
        q0 = np.zeros((16, _LANES), np.float32)
        g0 = np.zeros((16, _LANES), np.float32)
        q = np.empty((16, _LANES), np.float32)
        g = np.empty((16, _LANES), np.float32)
        d = np.empty(_LANES, np.float32)
        best_q = np.zeros((16, _LANES), np.float32)
        best = np.zeros(_LANES, np.float32)
        loss = np.empty(_LANES, np.float32)
        scale = np.ones(_LANES, np.float32)
        inverse = np.ones(_LANES, np.float32)
        code = np.ones(_LANES, np.int64)
        best_code = np.zeros(_LANES, np.uint8)
        for i in range(16):
            for n in range(lanes):
                q0[i, n] = values[start + i, r0 + n]
                g0[i, n] = gradient[start + i, r0 + n]
                best_q[i, n] = q0[i, n]
        for n in range(lanes):
            best_code[n] = scales[group, r0 + n]
        for step in range(-1, 2):
            for n in range(lanes):
                code[n] = min(126, max(1, np.int64(scales[group, r0 + n]) + step))  # type: ignore[assignment]
                scale[n] = e4m3[code[n]]
                inverse[n] = np.float32(1.0) / scale[n]
            for n in range(_LANES):
                loss[n] = np.float32(0.0)
            for i in range(16):
                for n in range(_LANES):
                    q[i, n] = q0[i, n]
                    g[i, n] = g0[i, n]
            for sweep in range(2):
                for i in range(16):
                    curvature = hessian[i, i]
                    inverse_curvature = np.float32(1.0) / curvature
                    for n in range(_LANES):
                        wanted = q[i, n] + g[i, n] * inverse_curvature
                        value = _round_e2m1(wanted * inverse[n]) * scale[n]
                        change = value - q[i, n]
                        loss[n] += change * (change * curvature - np.float32(2.0) * g[i, n])
                        q[i, n] = value
                        d[n] = change
                    # In the last sweep no one reads the gradients of those that had their turn.
                    for k in range(i + 1 if sweep else 0, 16):
                        h = hessian[k, i]
                        for n in range(_LANES):
                            g[k, n] -= h * d[n]
            for n in range(_LANES):
                if loss[n] < best[n]:
                    best[n] = loss[n]
                    best_code[n] = code[n]
                    for i in range(16):
                        best_q[i, n] = q[i, n]
        for i in range(16):
            for n in range(lanes):
                delta[i, r0 + n] = best_q[i, n] - q0[i, n]
                values[start + i, r0 + n] = best_q[i, n]
        for n in range(lanes):
            scales[group, r0 + n] = best_code[n]


@_kernel
def subtract_product(target, coefficients, update):  # type: ignore[no-untyped-def]
    """``target -= coefficients.T @ update``: target [K, N], coefficients [16, K], update [16, N], float32.

    For the small products between two groups, which take BLAS longer to start than to do.
    """
    features, rows = target.shape
    u = np.zeros((16, _LANES), np.float32)
    t = np.empty(_LANES, np.float32)
    for r0 in range(0, rows, _LANES):
        lanes = min(_LANES, rows - r0)
        for i in range(16):
            for n in range(lanes):
                u[i, n] = update[i, r0 + n]
        for k in range(features):
            for n in range(_LANES):
                t[n] = np.float32(0.0)
            for i in range(0, 16, 4):
                c0 = coefficients[i, k]
                c1 = coefficients[i + 1, k]
                c2 = coefficients[i + 2, k]
                c3 = coefficients[i + 3, k]
                for n in range(_LANES):
                    t[n] += c0 * u[i, n] + c1 * u[i + 1, n] + c2 * u[i + 2, n] + c3 * u[i + 3, n]
            for n in range(lanes):
                target[k, r0 + n] -= t[n]
