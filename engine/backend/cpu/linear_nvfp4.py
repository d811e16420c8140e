"""Rows of a linear layer in NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.jit import kernel
from engine.backend.cpu.linear_part import Allocate, biases, row_scales
from engine.backend.cpu.registers import (
    LANES,
    WIDE,
    accumulate_broadcast,
    decode_e2m1,
    load,
    multiply,
    shift_right,
    store_tokens,
    zero,
    zeros,
)
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import DType, LinearSource
from engine.errors import CheckpointError

__all__ = ["Nvfp4Rows"]

_GROUP = 16
_Weight = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Rows:
    """NVFP4 in blocks of 16 rows, resident in one buffer. Rows behind the last are zeros.

    A register's lanes are the rows of a block: all of them use the same number of `x`, and no sum goes across.
    """

    rows: int
    tensors: tuple[HostTensor]
    codes: np.ndarray = field(repr=False)
    """uint32 [blocks, K/8, 16 rows]: eight codes of a row, the first in the lowest bits"""
    scales: np.ndarray = field(repr=False)
    """uint8 (E4M3) [blocks, K/16, 16 rows]"""
    row_scales: np.ndarray = field(repr=False)
    """float32 [blocks * 16]: each row's global scale"""
    biases: np.ndarray = field(repr=False)
    """float32 [blocks * 16], or empty"""

    @classmethod
    def load(cls, sources: Sequence[LinearSource], allocate: Allocate) -> Self:
        """Copy `sources`, one below the other, into the resident layout.

        Raises
        ------
        CheckpointError
            K is not a multiple of 16.
        """
        columns = sources[0].shape[1]
        for source in sources:
            if columns % _GROUP:
                raise CheckpointError(f"{source.name}: NVFP4 needs columns in groups of 16, not {columns}")
        rows = sum(source.shape[0] for source in sources)
        blocks = -(-rows // LANES)
        bias = biases(sources)
        shapes = [
            ((blocks, columns // 8, LANES), np.uint32),
            ((blocks * LANES,), np.float32),
            ((blocks * LANES if bias.size else 0,), np.float32),
            ((blocks, columns // _GROUP, LANES), np.uint8),
        ]
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes]
        tensor = allocate((sum(sizes),), DType.UINT8)
        pieces = np.split(tensor.array, np.cumsum(sizes)[:-1])
        codes, scales_of_rows, bias_of_rows, scales = (
            piece.view(dtype).reshape(shape) for piece, (shape, dtype) in zip(pieces, shapes, strict=True)
        )
        first = 0
        for source in sources:
            assert source.group_scales is not None
            _fill(codes, np.ascontiguousarray(source.weight).view(np.uint32), first)
            _fill(scales, source.group_scales, first)
            first += source.shape[0]
        tail = np.zeros((blocks * LANES - rows, 1), np.uint32)
        _fill(codes, np.broadcast_to(tail, (len(tail), columns // 8)), rows)
        _fill(scales, np.broadcast_to(tail, (len(tail), columns // _GROUP)), rows)
        scales_of_rows[:rows], scales_of_rows[rows:] = row_scales(sources), 0
        if bias.size:
            bias_of_rows[:rows], bias_of_rows[rows:] = bias, 0
        return cls(rows, (tensor,), codes, scales, scales_of_rows, bias_of_rows)

    def apply(self, x: np.ndarray, out: np.ndarray, column: int, scratch: np.ndarray) -> None:
        """``x @ W.T + bias`` to the columns of `out` from `column` on."""
        weight = self.codes, self.scales, self.row_scales, self.biases
        _multiply(weight, self.rows, x, out, column, scratch)

    def scratch_size(self, max_tokens: int) -> int:
        """float32 elements of scratch that each thread needs for up to `max_tokens` tokens."""
        tokens = min(max_tokens, _MOST)
        return self.scales.shape[1] * _GROUP * _MOST + LANES * _MOST


def _fill(blocks: np.ndarray, source: np.ndarray, first: int) -> None:
    """Put `source` [n, columns] where the rows from `first` on are in `blocks` [blocks, columns, 16 rows]."""
    by_row = blocks.transpose(0, 2, 1)
    last = first + len(source)
    head = min(-(-first // LANES) * LANES, last)
    tail = max(last // LANES * LANES, head)
    if first < head:
        by_row[first // LANES, first % LANES : first % LANES + head - first] = source[: head - first]
    whole = source[head - first : tail - first]
    by_row[head // LANES : tail // LANES] = whole.reshape(-1, LANES, source.shape[1])
    if tail < last:
        by_row[tail // LANES, : last - tail] = source[tail - first :]


_ONE, _TWO, _FOUR, _EIGHT, _TWELVE = (0,), (0,) * 2, (0,) * 4, (0,) * 8, (0,) * 12
"""Tiles: a tuple's length says how many tokens' sums a kernel keeps in registers."""
_MOST = len(_TWELVE if WIDE else _FOUR)


@kernel(parallel=True)
def _multiply(
    weight: _Weight, rows: int, x: np.ndarray, out: np.ndarray, column: int, scratch: np.ndarray
) -> None:
    parts = scratch.shape[0]
    for part in prange(parts):
        _multiply_part(weight, rows, np.int64(part), parts, x, out, column, scratch[part])


@kernel()
def _multiply_part(
    weight: _Weight,
    rows: int,
    part: int,
    parts: int,
    x: np.ndarray,
    out: np.ndarray,
    column: int,
    scratch: np.ndarray,
) -> None:
    """Part `part` of `parts` of the rows, for a tile of tokens after the other."""
    pairs = (weight[0].shape[0] + 1) // 2
    first, last = pairs * part // parts * 2, pairs * (part + 1) // parts * 2
    for t in range(0, x.shape[0], _MOST):
        count = min(_MOST, x.shape[0] - t)
        # One token's numbers already lie as they are used.
        if count == 1:
            _sweep_pairs(weight, rows, first, last, x, t * x.shape[1], out, t, column, scratch, _ONE)
        elif count == 2:
            _interleave(x, t, count, scratch, 2)
            _sweep_pairs(weight, rows, first, last, scratch, 0, out, t, column, scratch, _TWO)
        elif not WIDE:
            _interleave(x, t, count, scratch, 4)
            _sweep(weight, rows, first, last, scratch, 0, out, t, column, scratch, _FOUR)
        elif count <= 4:
            _interleave(x, t, count, scratch, 4)
            _sweep_pairs(weight, rows, first, last, scratch, 0, out, t, column, scratch, _FOUR)
        elif count <= 8:
            _interleave(x, t, count, scratch, 8)
            _sweep_pairs(weight, rows, first, last, scratch, 0, out, t, column, scratch, _EIGHT)
        else:
            _interleave(x, t, count, scratch, 12)
            _sweep(weight, rows, first, last, scratch, 0, out, t, column, scratch, _TWELVE)


@kernel()
def _interleave(x: np.ndarray, first: int, count: int, scratch: np.ndarray, width: int) -> None:
    """Put `width` tokens' numbers for the same column side by side. Tokens behind the last are zeros."""
    columns = x.shape[1]
    for t in range(width):
        for k in range(columns):
            scratch[k * width + t] = x[first + t, k] if t < count else float32(0.0)


@kernel()
def _sweep(
    weight: _Weight,
    rows: int,
    first: int,
    last: int,
    x: np.ndarray,
    start: int,
    out: np.ndarray,
    token: int,
    column: int,
    scratch: np.ndarray,
    tile: tuple[int, ...],
) -> None:
    """Blocks first..last, for the tokens whose numbers lie side by side in `x` from `start` on."""
    codes, scales, row_scales, biases = weight
    groups, width, count = scales.shape[1], out.shape[1], min(len(tile), out.shape[0] - token)
    for block in range(first, min(last, scales.shape[0])):
        sums = zeros(tile)
        at = start
        for group in range(block * groups, block * groups + groups):
            scale = load(scales, group * LANES)
            for half in range(2 * group, 2 * group + 2):
                code = load(codes, half * LANES)
                for _ in range(8):
                    sums = accumulate_broadcast(sums, multiply(decode_e2m1(code), scale), x, at)
                    at += len(tile)
                    code = shift_right(code)
        row = block * LANES
        bias = load(biases, row) if biases.size > 0 else zero()
        if row + LANES <= rows:
            store_tokens(out, token * width + column + row, width, sums, load(row_scales, row), bias, count)
        else:
            spare = scratch.size - len(tile) * LANES
            store_tokens(scratch, spare, LANES, sums, load(row_scales, row), bias, count)
            _copy_lanes(scratch, spare, rows - row, out, token, count, column + row)


@kernel()
def _sweep_pairs(
    weight: _Weight,
    rows: int,
    first: int,
    last: int,
    x: np.ndarray,
    start: int,
    out: np.ndarray,
    token: int,
    column: int,
    scratch: np.ndarray,
    tile: tuple[int, ...],
) -> None:
    """As `_sweep`, two blocks at a time: the sums of one and of few tokens do not keep the multipliers busy."""
    codes, scales, row_scales, biases = weight
    groups, width, count = scales.shape[1], out.shape[1], min(len(tile), out.shape[0] - token)
    for block in range(first, last, 2):
        # Behind an odd last block it comes again, and is not stored.
        other = groups if block + 1 < scales.shape[0] else 0
        sums0, sums1 = zeros(tile), zeros(tile)
        at = start
        for group in range(block * groups, block * groups + groups):
            scale0, scale1 = load(scales, group * LANES), load(scales, (group + other) * LANES)
            for half in range(2 * group, 2 * group + 2):
                code0, code1 = load(codes, half * LANES), load(codes, (half + 2 * other) * LANES)
                for _ in range(8):
                    sums0 = accumulate_broadcast(sums0, multiply(decode_e2m1(code0), scale0), x, at)
                    sums1 = accumulate_broadcast(sums1, multiply(decode_e2m1(code1), scale1), x, at)
                    at += len(tile)
                    code0, code1 = shift_right(code0), shift_right(code1)
        for row, sums in ((block * LANES, sums0), ((block + 1) * LANES, sums1)):
            if row + LANES <= rows:
                bias = load(biases, row) if biases.size > 0 else zero()
                store_tokens(out, token * width + column + row, width, sums, load(row_scales, row), bias, count)
            elif row < rows:
                bias = load(biases, row) if biases.size > 0 else zero()
                spare = scratch.size - len(tile) * LANES
                store_tokens(scratch, spare, LANES, sums, load(row_scales, row), bias, count)
                _copy_lanes(scratch, spare, rows - row, out, token, count, column + row)


@kernel()
def _copy_lanes(
    scratch: np.ndarray, start: int, lanes: int, out: np.ndarray, token: int, count: int, column: int
) -> None:
    """Put the first lanes of a block's registers, which were stored in `scratch`, in `out`."""
    for t in range(count):
        for lane in range(lanes):
            out[token + t, column + lane] = scratch[start + t * LANES + lane]
