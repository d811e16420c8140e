"""NVFP4: E2M1 codes in groups of 16 with an E4M3 scale each, and one FP32 scale for the tensor.

The value of an element is ``e2m1(code) * e4m3(group_scale) * global_scale``. The common rule sets a group's
scale to amax / 6, so that the largest element is exact; which scale gives the least squared error depends on
all sixteen. There are only 126 positive E4M3 numbers, eight an octave, so the neighbours of amax / 6 are
simply tried.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from engine.quantizer import kernels

__all__ = [
    "E2M1_VALUES",
    "GROUP_SIZE",
    "NVFP4Weight",
    "amax_global_scale",
    "dequantize",
    "pack",
    "quantize",
    "quantize_group",
]

GROUP_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
"""magnitudes of codes 0..7; bit 3 of a code is the sign"""
E4M3_POSITIVE = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""values of E4M3 codes 0..126 (127 is NaN), ascending"""

# Steps of the E4M3 code around amax / 6 that are tried: down to about half of it (the largest elements
# saturate) and up to half as much again (the largest element meets 4 instead of 6, where the grid is finer).
# Wider finds nothing.
LOWEST_STEP, HIGHEST_STEP = -7, 5

_ROWS = 1024  # rows of a weight that are transposed at a time, by one thread


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Weight:
    """A linear layer's weight [N, K] as a ModelOpt checkpoint stores it."""

    codes: np.ndarray
    """uint8 [N, K/2]; the even-K element is in the low nibble"""
    group_scales: np.ndarray
    """uint8 (E4M3) [N, K/16]"""
    global_scale: float
    """float32 multiplier"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2


def amax_global_scale(*weights: np.ndarray) -> float:
    """amax / (6 · 448) over all `weights`: the largest group's scale is E4M3's largest number.

    Weights that an engine stacks into one product (q, k, v; gate, up) share it, because other engines keep
    one global scale for the stack.
    """
    amax = max((float(np.abs(w).max(initial=0.0)) for w in weights), default=0.0)
    scale = np.float32(amax / (E2M1_MAX * E4M3_MAX))
    return float(scale) if scale >= np.finfo(np.float32).tiny else 1.0


def quantize(
    weight: np.ndarray,
    *,
    global_scale: float | None = None,
    importance: np.ndarray | None = None,
    steps: tuple[int, int] = (LOWEST_STEP, HIGHEST_STEP),
    threads: int | None = None,
) -> NVFP4Weight:
    """Quantise float32 [N, K], each group on its own, with the scale of least (weighted) squared error.

    Parameters
    ----------
    global_scale
        The tensor's scale; `amax_global_scale(weight)` if not given.
    importance
        float32 [K], positive: weight of each column's squared error (its input's second moment).
    steps
        First and last E4M3 code tried, relative to the one nearest to amax / 6. ``(0, 0)`` is the amax rule.
    threads
        None: all cores.

    Raises
    ------
    ValueError
        K is not a multiple of 16.
    """
    rows, columns = weight.shape
    if columns % GROUP_SIZE:
        raise ValueError(f"NVFP4 needs a multiple of {GROUP_SIZE} columns, got {columns}")
    scale = amax_global_scale(weight) if global_scale is None else global_scale
    inverse_root = np.ones(columns, np.float32)
    if importance is not None:
        # Relative to the mean, with a floor: a column that calibration never saw still has a best code.
        relative = importance / max(float(importance.mean()), np.finfo(np.float32).tiny)
        inverse_root = (1.0 / np.sqrt(np.maximum(relative, 1e-12))).astype(np.float32)
    codes = np.empty((rows, columns // 2), np.uint8)
    group_scales = np.empty((rows, columns // GROUP_SIZE), np.uint8)

    def quantize_rows(start: int) -> None:
        part = np.ascontiguousarray(weight[start : start + _ROWS].T, dtype=np.float32) / np.float32(scale)
        values, scales = np.empty_like(part), np.empty((columns // GROUP_SIZE, part.shape[1]), np.uint8)
        errors = np.empty((GROUP_SIZE, part.shape[1]), np.float32)
        for group in range(columns // GROUP_SIZE):
            factor = np.diag(inverse_root[group * GROUP_SIZE : (group + 1) * GROUP_SIZE])
            quantize_group(part, group, factor, values, scales, errors, feedback=False, steps=steps)
        done = pack(values, scales, scale)
        codes[start : start + _ROWS] = done.codes
        group_scales[start : start + _ROWS] = done.group_scales

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(quantize_rows, range(0, rows, _ROWS)):
            pass
    return NVFP4Weight(codes, group_scales, scale)


def dequantize(weight: NVFP4Weight) -> np.ndarray:
    """Values, float32 [N, K]."""
    rows, columns = weight.shape
    signed = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
    values = np.empty((rows, columns), np.float32)
    values[:, 0::2] = signed[weight.codes & 15]
    values[:, 1::2] = signed[weight.codes >> 4]
    scales = weight.group_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(
        weight.global_scale
    )
    grouped: np.ndarray = values.reshape(rows, -1, GROUP_SIZE) * scales[:, :, None]
    return grouped.reshape(rows, columns)


def quantize_group(
    weight: np.ndarray,
    group: int,
    factor: np.ndarray,
    values: np.ndarray,
    scales: np.ndarray,
    errors: np.ndarray,
    *,
    feedback: bool,
    steps: tuple[int, int] = (LOWEST_STEP, HIGHEST_STEP),
) -> None:
    """Quantise one group of all rows, with the scale of least error among the candidates.

    With `feedback`, the error of an element is passed on to the later elements of its group before these are
    rounded (the inner loop of GPTQ, Frantar et al. 2022, algorithm 1), anew for each candidate scale.

    Parameters
    ----------
    weight
        float32 [K, N], in units of the global scale; rows ``16 * group`` and the 15 after it are read.
    factor
        float32 [16, 16], upper triangular: the group's block of the Cholesky factor of the inverse Hessian.
        Without `feedback` only its diagonal counts: the error of element i is divided by ``factor[i, i]``.
    values, scales, errors
        Outputs: values [K, N] in units of the global scale (the group's rows), E4M3 codes uint8 [K/16, N]
        (the group's row), and scaled errors ``(w - q) / factor[i, i]`` [16, N].
    """
    factor = np.ascontiguousarray(factor, np.float32)
    kernels.quantize_group(weight, group, factor, E4M3_POSITIVE, *steps, feedback, values, scales, errors)


def pack(values: np.ndarray, scales: np.ndarray, global_scale: float) -> NVFP4Weight:
    """Pack values that lie on the grid: float32 [K, N] in units of the global scale, scales uint8 (E4M3)
    [K/16, N]."""
    codes = np.empty(values.shape, np.uint8)
    kernels.encode_e2m1(values, E4M3_POSITIVE[scales], codes)
    packed = codes[0::2] | codes[1::2] << 4
    return NVFP4Weight(np.ascontiguousarray(packed.T), np.ascontiguousarray(scales.T), global_scale)
