"""Rows of a linear layer in NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numba import prange

from engine.backend.cpu.jit import kernel
from engine.backend.cpu.layout import LARGEST_TILE, Allocate, RowsLayout, nvfp4_pieces
from engine.backend.cpu.linear_part import biases, row_scales
from engine.backend.cpu.registers import (
    LANES,
    WIDE,
    accumulate_broadcast,
    decode_e2m1,
    load,
    multiply,
    prefetch,
    shift_right,
    store_interleaved,
    store_tokens,
    zero,
    zeros,
)
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import LinearSource

__all__ = ["Nvfp4Rows"]

_Weight = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Codes, scales, row scales and biases of `Nvfp4Rows`."""


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Rows:
    """NVFP4 in blocks of 16 rows, resident in one buffer. Rows behind the last are zeros.

    A register's lanes are the rows of a block: all use the same number of `x`, and no sum goes across lanes.
    Each sum is a chain of multiply-adds in the order of K, of which a row of `x` and nothing else decides.
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
    def load(cls, layout: RowsLayout, allocate: Allocate[HostTensor]) -> Self:
        """Copy the layout's sources, one below the other, to their places."""
        bias = biases(layout.sources)
        pieces = nvfp4_pieces(layout.rows, layout.columns, bias.size > 0)
        [tensor] = layout.allocate(allocate)
        parts = np.split(tensor.array, np.cumsum([piece.nbytes for piece in pieces])[:-1])
        arrays = [
            part.view(piece.dtype).reshape(piece.shape) for part, piece in zip(parts, pieces, strict=True)
        ]
        loaded = cls(layout.rows, (tensor,), *arrays)
        try:
            loaded._fill(layout.sources, bias)
        except BaseException:
            tensor.buffer.close()  # the traceback would keep it alive
            raise
        return loaded

    def _fill(self, sources: Sequence[LinearSource], bias: np.ndarray) -> None:
        """Copy everything to its place, straight from the mapped file."""
        first = 0
        for source in sources:
            assert source.group_scales is not None, f"{source.name} is NVFP4"
            _fill_blocks(self.codes, np.ascontiguousarray(source.weight).view(np.uint32), first)
            _fill_blocks(self.scales, source.group_scales, first)
            first += source.shape[0]
        for blocks in (self.codes, self.scales):
            behind = blocks.shape[0] * LANES - first
            _fill_blocks(blocks, np.zeros((behind, blocks.shape[1]), blocks.dtype), first)
        for target, values in ((self.row_scales, row_scales(sources)), (self.biases, bias)):
            target[: values.size] = values
            target[values.size :] = 0

    def apply(self, x: np.ndarray, out: np.ndarray, column: int, scratch: np.ndarray) -> None:
        """``x @ W.T + bias`` to the columns of `out` from `column` on."""
        weight = self.codes, self.scales, self.row_scales, self.biases
        if self.rows * x.size < _SERIAL_WORK:
            _multiply_part(weight, self.rows, 0, 1, x, out, column, scratch[0])
        else:
            _multiply(weight, self.rows, x, out, column, scratch)


def _fill_blocks(blocks: np.ndarray, source: np.ndarray, first: int) -> None:
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


_ONE, _TWO, _FOUR, _EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8
"""Tiles: a tuple's length says for how many tokens sums are kept in registers."""
_MOST = LARGEST_TILE
_SERIAL_WORK = 1 << 17
"""Multiplications below which waking another thread takes longer than the work."""


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
    for token in range(0, x.shape[0], _MOST):
        count = min(_MOST, x.shape[0] - token)
        # One token's numbers already lie as they are used.
        if count == 1:
            start = token * x.shape[1]
            _multiply_tile(weight, rows, first, last, x, start, out, token, column, scratch, _ONE)
        elif count == 2:
            _interleave(x, token, count, scratch, _TWO)
            _multiply_tile(weight, rows, first, last, scratch, 0, out, token, column, scratch, _TWO)
        elif WIDE and count <= 4:
            _interleave(x, token, count, scratch, _FOUR)
            _multiply_tile(weight, rows, first, last, scratch, 0, out, token, column, scratch, _FOUR)
        elif WIDE:
            _interleave(x, token, count, scratch, _EIGHT)
            _multiply_tile(weight, rows, first, last, scratch, 0, out, token, column, scratch, _EIGHT)


@kernel()
def _interleave(x: np.ndarray, first: int, count: int, scratch: np.ndarray, tile: tuple[int, ...]) -> None:
    """Put the numbers of a tile's tokens for the same column side by side."""
    columns = x.shape[1]
    for k in range(0, columns, LANES):
        store_interleaved(scratch, k * len(tile), x, first * columns + k, columns, count, tile)


@kernel()
def _multiply_tile(
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
    """Blocks first..last, for the tokens whose numbers lie side by side in `x` from `start` on.

    Blocks come in pairs: the sums of one, for few tokens, would not keep the multipliers busy.
    """
    codes, scales, row_scales, biases = weight
    groups, width, count = scales.shape[1], out.shape[1], min(len(tile), out.shape[0] - token)
    for block in range(first, last, 2):
        # Behind an odd last block it comes again, and is not stored.
        other = groups if block + 1 < scales.shape[0] else 0
        sums0, sums1 = zeros(tile), zeros(tile)
        at = start
        for group in range(block * groups, block * groups + groups):
            scale0, scale1 = load(scales, group * LANES), load(scales, (group + other) * LANES)
            # What the next pair will read: a block is too short for the hardware to look ahead in it.
            prefetch(scales, (group + 2 * groups) * LANES)
            prefetch(scales, (group + 3 * groups) * LANES)
            for half in range(2 * group, 2 * group + 2):
                code0, code1 = load(codes, half * LANES), load(codes, (half + 2 * other) * LANES)
                prefetch(codes, (half + 4 * groups) * LANES)
                prefetch(codes, (half + 6 * groups) * LANES)
                for _ in range(8):
                    sums0 = accumulate_broadcast(sums0, multiply(decode_e2m1(code0), scale0), x, at)
                    sums1 = accumulate_broadcast(sums1, multiply(decode_e2m1(code1), scale1), x, at)
                    at += len(tile)
                    code0, code1 = shift_right(code0), shift_right(code1)
        for row, sums in ((block * LANES, sums0), ((block + 1) * LANES, sums1)):
            if row >= rows:
                continue
            bias = load(biases, row) if biases.size > 0 else zero()
            if row + LANES <= rows:
                place = token * width + column + row
                store_tokens(out, place, width, sums, load(row_scales, row), bias, count)
                continue
            spare = scratch.size - len(tile) * LANES
            store_tokens(scratch, spare, LANES, sums, load(row_scales, row), bias, count)
            for t in range(count):
                for lane in range(rows - row):
                    out[token + t, column + row + lane] = scratch[spare + t * LANES + lane]
