"""Rows of a linear layer in NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numba import prange
from numpy import float32, uint32

from engine.backend.cpu.floats import decode_e4m3
from engine.backend.cpu.jit import CONTRACT, kernel
from engine.backend.cpu.linear_part import Allocate, biases, row_scales
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import DType, LinearSource
from engine.errors import CheckpointError

__all__ = ["Nvfp4Rows"]

_LANES = 16
_GROUP = 16
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


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
        blocks = -(-rows // _LANES)
        bias = biases(sources)
        shapes = [
            ((blocks, columns // 8, _LANES), np.uint32),
            ((blocks * _LANES,), np.float32),
            ((blocks * _LANES if bias.size else 0,), np.float32),
            ((blocks, columns // _GROUP, _LANES), np.uint8),
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
        tail = np.zeros((blocks * _LANES - rows, 1), np.uint32)
        _fill(codes, np.broadcast_to(tail, (len(tail), columns // 8)), rows)
        _fill(scales, np.broadcast_to(tail, (len(tail), columns // _GROUP)), rows)
        scales_of_rows[:rows], scales_of_rows[rows:] = row_scales(sources), 0
        if bias.size:
            bias_of_rows[:rows], bias_of_rows[rows:] = bias, 0
        return cls(rows, (tensor,), codes, scales, scales_of_rows, bias_of_rows)

    def apply(self, x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        """``out = x @ W.T + bias``; float32 x [T, K], out [T, rows] or columns of a wider array."""
        _multiply(self.codes, self.scales, self.row_scales, self.biases, x, out, scratch.shape[0])

    def scratch_size(self, max_tokens: int) -> int:
        """float32 elements of scratch that each thread needs for up to `max_tokens` tokens."""
        return 0


def _fill(blocks: np.ndarray, source: np.ndarray, first: int) -> None:
    """Put `source` [n, columns] where the rows from `first` on are in `blocks` [blocks, columns, 16 rows]."""
    by_row = blocks.transpose(0, 2, 1)
    last = first + len(source)
    head = min(-(-first // _LANES) * _LANES, last)
    tail = max(last // _LANES * _LANES, head)
    if first < head:
        by_row[first // _LANES, first % _LANES : first % _LANES + head - first] = source[: head - first]
    whole = source[head - first : tail - first]
    by_row[head // _LANES : tail // _LANES] = whole.reshape(-1, _LANES, source.shape[1])
    if tail < last:
        by_row[tail // _LANES, : last - tail] = source[tail - first :]


@kernel(parallel=True, fastmath=CONTRACT)
def _multiply(
    codes: np.ndarray,
    scales: np.ndarray,
    row_scales: np.ndarray,
    biases: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    parts: int,
) -> None:
    blocks = codes.shape[0]
    for part in prange(parts):
        sums = np.empty(_LANES, np.float32)
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            for t in range(x.shape[0]):
                sums[:] = float32(0.0)
                for g in range(scales.shape[1]):
                    for k in range(_GROUP):
                        factor = x[t, g * _GROUP + k]
                        word = codes[block, g * 2 + k // 8]
                        for lane in range(_LANES):
                            scale = decode_e4m3(scales[block, g, lane])
                            code = uint32(uint32(word[lane] >> uint32(k % 8 * 4)) & uint32(15))
                            sums[lane] += _E2M1[code] * scale * factor
                first = block * _LANES
                for lane in range(min(_LANES, out.shape[1] - first)):
                    total = sums[lane] * row_scales[first + lane]
                    if biases.size > 0:
                        total += biases[first + lane]
                    out[t, first + lane] = total
