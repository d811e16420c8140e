"""Rows of a linear layer in bfloat16 or E4M3, as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.floats import decode_bf16, decode_e4m3
from engine.backend.cpu.jit import REASSOCIATE, kernel
from engine.backend.cpu.linear_part import Allocate, biases, row_scales
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import DType, LinearSource, WeightFormat

__all__ = ["PlainRows"]


@dataclass(frozen=True, slots=True, eq=False)
class PlainRows:
    """Row-major weights: bfloat16, or E4M3 with a scale for each row."""

    weight: HostTensor
    """uint16 (bfloat16) or uint8 (E4M3) [N, K]"""
    factors: HostTensor | None
    """float32 [2, N]: each row's scale and bias; None: ones and zeros"""

    @classmethod
    def load(cls, sources: Sequence[LinearSource], allocate: Allocate) -> Self:
        """Copy `sources`, one below the other."""
        rows = sum(source.shape[0] for source in sources)
        is_bf16 = sources[0].format is WeightFormat.BF16
        weight = allocate((rows, sources[0].shape[1]), DType.BFLOAT16 if is_bf16 else DType.FLOAT8_E4M3)
        first = 0
        for source in sources:
            weight.array[first : first + source.shape[0]] = source.weight
            first += source.shape[0]
        bias = biases(sources)
        if is_bf16 and not bias.size:
            return cls(weight, None)
        try:
            factors = allocate((2, rows), DType.FLOAT32)
        except BaseException:
            weight.buffer.close()
            raise
        factors.array[0] = row_scales(sources)
        factors.array[1] = bias if bias.size else 0
        return cls(weight, factors)

    @property
    def rows(self) -> int:
        """How many."""
        return self.weight.shape[0]

    @property
    def tensors(self) -> tuple[HostTensor, ...]:
        """Everything that is resident."""
        return (self.weight,) if self.factors is None else (self.weight, self.factors)

    def apply(self, x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        """``out = x @ W.T + bias``; float32 x [T, K], out [T, rows] or columns of a wider array."""
        multiply = _multiply_bf16 if self.weight.dtype is DType.BFLOAT16 else _multiply_e4m3
        factors = np.empty((2, 0), np.float32) if self.factors is None else self.factors.array
        multiply(self.weight.array, factors, x, out, scratch.shape[0])

    def scratch_size(self, max_tokens: int) -> int:
        """float32 elements of scratch that each thread needs for up to `max_tokens` tokens."""
        return 0


@kernel(parallel=True, fastmath=REASSOCIATE)
def _multiply_bf16(
    weight: np.ndarray, factors: np.ndarray, x: np.ndarray, out: np.ndarray, parts: int
) -> None:
    for part in prange(parts):
        for n in range(weight.shape[0] * part // parts, weight.shape[0] * (part + 1) // parts):
            row = weight[n]
            for t in range(x.shape[0]):
                token = x[t]
                total = float32(0.0)
                for k in range(row.size):
                    total += decode_bf16(row[k]) * token[k]
                if factors.shape[1]:
                    total = total * factors[0, n] + factors[1, n]
                out[t, n] = total


@kernel(parallel=True, fastmath=REASSOCIATE)
def _multiply_e4m3(
    weight: np.ndarray, factors: np.ndarray, x: np.ndarray, out: np.ndarray, parts: int
) -> None:
    for part in prange(parts):
        for n in range(weight.shape[0] * part // parts, weight.shape[0] * (part + 1) // parts):
            row = weight[n]
            for t in range(x.shape[0]):
                token = x[t]
                total = float32(0.0)
                for k in range(row.size):
                    total += decode_e4m3(row[k]) * token[k]
                out[t, n] = total * factors[0, n] + factors[1, n]
