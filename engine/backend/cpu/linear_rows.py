"""Rows of a linear layer in bfloat16 or E4M3, as the checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numba import prange

from engine.backend.cpu.jit import kernel
from engine.backend.cpu.layout import Allocate, RowsLayout
from engine.backend.cpu.linear_part import biases, row_scales
from engine.backend.cpu.registers import (
    LANES,
    WIDE,
    accumulate_first,
    accumulate_rows,
    load,
    load_first,
    load_quad,
    multiply_add,
    prefetch,
    store,
    store_quads,
    sum_lanes,
    zeros,
)
from engine.backend.cpu.tensor import HostTensor

__all__ = ["PlainRows"]

_NO_FACTORS = np.empty((2, 0), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PlainRows:
    """Row-major weights: bfloat16, or E4M3 with a scale for each row.

    A register's lanes are consecutive columns. Each lane's sum is a chain of multiply-adds in the order of K,
    and lanes are added in a fixed order: a row of `x` and nothing else decides.
    """

    weight: HostTensor
    """uint16 (bfloat16) or uint8 (E4M3) [N, K]"""
    factors: HostTensor | None
    """float32 [2, N padded to a multiple of 4]: each row's scale and bias; None: ones and zeros"""

    @classmethod
    def load(cls, layout: RowsLayout, allocate: Allocate[HostTensor]) -> Self:
        """Copy the layout's sources, one below the other."""
        weight, *others = tensors = layout.allocate(allocate)
        factors = others[0] if others else None
        try:
            first = 0
            for source in layout.sources:
                weight.array[first : first + source.shape[0]] = source.weight
                first += source.shape[0]
            if factors is not None:
                bias = biases(layout.sources)
                factors.array.fill(0)
                factors.array[0, : layout.rows] = row_scales(layout.sources)
                factors.array[1, : bias.size] = bias
        except BaseException:
            for tensor in tensors:
                tensor.buffer.close()  # the traceback would keep it alive
            raise
        return cls(weight, factors)

    @property
    def rows(self) -> int:
        """How many."""
        return self.weight.shape[0]

    @property
    def tensors(self) -> tuple[HostTensor, ...]:
        """Everything that is resident."""
        return (self.weight,) if self.factors is None else (self.weight, self.factors)

    def apply(self, x: np.ndarray, out: np.ndarray, column: int, scratch: np.ndarray) -> None:
        """``x @ W.T + bias`` to the columns of `out` from `column` on."""
        factors = _NO_FACTORS if self.factors is None else self.factors.array
        if self.rows * x.size < _SERIAL_WORK:
            _multiply_part(self.weight.array, factors, 0, 1, x, out, column, scratch[0])
        else:
            _multiply(self.weight.array, factors, x, out, column, scratch)


_ONE, _TWO, _FOUR = (0,), (0,) * 2, (0,) * 4
"""Tiles: a tuple's length says how many tokens' sums a kernel keeps in registers."""
_SERIAL_WORK = 1 << 17
"""Multiplications below which waking another thread takes longer than the work."""
_CACHED = 1 << 16
"""Weights that stay in a core's own cache while all tokens go by."""


@kernel(parallel=True)
def _multiply(
    weight: np.ndarray, factors: np.ndarray, x: np.ndarray, out: np.ndarray, column: int, scratch: np.ndarray
) -> None:
    parts = scratch.shape[0]
    for part in prange(parts):
        _multiply_part(weight, factors, np.int64(part), parts, x, out, column, scratch[part])


@kernel()
def _multiply_part(
    weight: np.ndarray,
    factors: np.ndarray,
    part: int,
    parts: int,
    x: np.ndarray,
    out: np.ndarray,
    column: int,
    scratch: np.ndarray,
) -> None:
    """Part `part` of `parts` of the rows, for all tokens."""
    quads, tokens = (weight.shape[0] + 3) // 4, x.shape[0]
    end = quads * (part + 1) // parts * 4
    fours, twos = (tokens // 4 * 4, tokens // 2 * 2) if WIDE else (0, 0)
    step = max(_CACHED // max(x.shape[1], 1) // 4 * 4, 4)
    for first in range(quads * part // parts * 4, end, step):
        last = min(first + step, end)
        for t in range(0, fours, 4):
            _multiply_tile(weight, factors, first, last, x, t, out, column, scratch, _FOUR)
        for t in range(fours, twos, 2):
            _multiply_tile(weight, factors, first, last, x, t, out, column, scratch, _TWO)
        for t in range(twos, tokens):
            _multiply_tile(weight, factors, first, last, x, t, out, column, scratch, _ONE)


@kernel()
def _multiply_tile(
    weight: np.ndarray,
    factors: np.ndarray,
    first: int,
    last: int,
    x: np.ndarray,
    token: int,
    out: np.ndarray,
    column: int,
    scratch: np.ndarray,
    tile: tuple[int, ...],
) -> None:
    """Rows first..last, four at a time, for as many tokens from `token` on as `tile` has elements."""
    rows, columns = weight.shape
    whole = columns // LANES * LANES
    left, start = columns - whole, token * columns
    for row in range(first, last, 4):
        # Rows behind the last are computed as the last again, and not stored.
        row0 = row * columns
        row1 = min(row + 1, rows - 1) * columns
        row2 = min(row + 2, rows - 1) * columns
        row3 = min(row + 3, rows - 1) * columns
        sums0, sums1, sums2, sums3 = zeros(tile), zeros(tile), zeros(tile), zeros(tile)
        for k in range(0, whole, LANES):
            # What the next four rows will read: each row is too short for the hardware to look ahead.
            prefetch(weight, row0 + k + 4 * columns)
            prefetch(weight, row1 + k + 4 * columns)
            prefetch(weight, row2 + k + 4 * columns)
            prefetch(weight, row3 + k + 4 * columns)
            sums0 = accumulate_rows(sums0, load(weight, row0 + k), x, start + k, columns)
            sums1 = accumulate_rows(sums1, load(weight, row1 + k), x, start + k, columns)
            sums2 = accumulate_rows(sums2, load(weight, row2 + k), x, start + k, columns)
            sums3 = accumulate_rows(sums3, load(weight, row3 + k), x, start + k, columns)
        if left:
            k = whole
            sums0 = accumulate_first(sums0, load_first(weight, row0 + k, left), x, start + k, columns, left)
            sums1 = accumulate_first(sums1, load_first(weight, row1 + k, left), x, start + k, columns, left)
            sums2 = accumulate_first(sums2, load_first(weight, row2 + k, left), x, start + k, columns, left)
            sums3 = accumulate_first(sums3, load_first(weight, row3 + k, left), x, start + k, columns, left)
        totals = sum_lanes(sums0, sums1, sums2, sums3)
        if factors.shape[1] > 0:
            totals = multiply_add(totals, load_quad(factors, row), load_quad(factors, factors.shape[1] + row))
        if row + 4 <= rows:
            store_quads(out, token * out.shape[1] + column + row, out.shape[1], totals, tile)
        else:
            store(scratch, 0, totals)
            for t in range(len(tile)):
                for r in range(rows - row):
                    out[token + t, column + row + r] = scratch[4 * t + r]
