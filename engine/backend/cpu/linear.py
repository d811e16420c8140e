"""Linear layers in host memory: parts of any format, stacked along their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from engine.backend.cpu.linear_nvfp4 import Nvfp4Rows
from engine.backend.cpu.linear_part import Allocate, LinearPart
from engine.backend.cpu.linear_rows import PlainRows
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import DType, LinearSource, WeightFormat
from engine.errors import CheckpointError
from engine.memory.scope import allocation_helper

__all__ = ["CpuLinear", "load_linear", "scratch_size"]


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinear:
    """A resident linear layer: runs of rows, each in its own format."""

    shape: tuple[int, int]
    """(N, K)"""
    parts: tuple[LinearPart, ...]

    @property
    def nbytes(self) -> int:
        """Resident bytes: weights, scales and biases with their padding."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)

    def apply(self, x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        """``out = x @ W.T + bias``, accumulated in float32. A row of `out` depends on its row of `x` alone.

        Parameters
        ----------
        x
            float32 [T, K].
        out
            float32 [T, N].
        scratch
            float32 [threads, at least `scratch_size`]. The work is split for as many threads as it has rows.
        """
        first = 0
        for part in self.parts:
            part.apply(x, out, first, scratch)
            first += part.rows

    def scratch_size(self, max_tokens: int) -> int:
        """float32 elements of scratch that each thread needs for up to `max_tokens` tokens."""
        return max(part.scratch_size(max_tokens) for part in self.parts)

    def table(self) -> HostTensor:
        """The weight as bfloat16 [N, K] in its own bytes.

        Raises
        ------
        ValueError
            It is not stored so.
        """
        part = self.parts[0]
        if len(self.parts) == 1 and isinstance(part, PlainRows) and part.weight.dtype is DType.BFLOAT16:
            return part.weight
        raise ValueError("only a BF16 linear is a table")


def scratch_size(linears: Sequence[CpuLinear], max_tokens: int) -> int:
    """float32 elements of scratch that each thread needs for the largest of `linears`."""
    return max((linear.scratch_size(max_tokens) for linear in linears), default=0)


@allocation_helper
def load_linear(parts: Sequence[LinearSource], allocate: Allocate) -> CpuLinear:
    """One resident linear out of `parts` stacked along N. Neighbours of one format become one run of rows.

    Nothing but the resident bytes is allocated: parts are repacked on their way from the mapped file.

    Raises
    ------
    CheckpointError
        The parts differ in K, or a shape is not what the format asks for.
    """
    columns = parts[0].shape[1]
    for source in parts:
        if source.shape[1] != columns:
            raise CheckpointError(f"{source.name}: {source.shape[1]} columns, its neighbours have {columns}")
    loaded: list[LinearPart] = []
    try:
        for weight_format, run in groupby(parts, key=lambda part: part.format):
            kind = Nvfp4Rows if weight_format is WeightFormat.NVFP4 else PlainRows
            loaded.append(kind.load(list(run), allocate))
    except BaseException:
        for part in loaded:
            for tensor in part.tensors:
                tensor.buffer.close()  # the traceback would keep it alive
        raise
    return CpuLinear((sum(part.rows for part in loaded), columns), tuple(loaded))
