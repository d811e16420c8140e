"""Linear layers in host memory: parts of any format, stacked along their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.backend.cpu.layout import Allocate, linear_layouts
from engine.backend.cpu.linear_nvfp4 import Nvfp4Rows
from engine.backend.cpu.linear_part import LinearPart
from engine.backend.cpu.linear_rows import PlainRows
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import DType, LinearSource, WeightFormat
from engine.memory.scope import allocation_helper

__all__ = ["CpuLinear", "load_linear", "scratch_size"]


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinear:
    """A resident linear layer: runs of rows, each in its own format."""

    shape: tuple[int, int]
    """(N, K)"""
    parts: tuple[LinearPart, ...]
    scratch_size: int
    """float32 elements of scratch that each thread needs"""

    @property
    def nbytes(self) -> int:
        """Resident bytes: weights, scales and biases with their padding."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)

    def apply(self, x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        """``out = x @ W.T + bias``, accumulated in float32.

        A row of `out` depends on its row of `x` and nothing else: not on T, nor on the number of threads.

        Parameters
        ----------
        x
            float32 [T, K], C-contiguous.
        out
            float32 [T, N], C-contiguous.
        scratch
            float32 [threads, at least `scratch_size`], C-contiguous. The work is split for as many threads as
            it has rows; what it holds is lost.

        Raises
        ------
        ValueError
            A shape does not fit. (The compiled kernels index without looking.)
        """
        rows, columns = self.shape
        if x.shape[1] != columns or out.shape != (x.shape[0], rows) or scratch.shape[1] < self.scratch_size:
            raise ValueError(
                f"linear {self.shape}: x {x.shape}, out {out.shape} and scratch {scratch.shape}: expected "
                f"[T, {columns}], [T, {rows}] and [threads, at least {self.scratch_size}]"
            )
        first = 0
        for part in self.parts:
            part.apply(x, out, first, scratch)
            first += part.rows

    def table(self) -> HostTensor:
        """The weight as bfloat16 [N, K], in its own bytes.

        Raises
        ------
        ValueError
            It is not stored so.
        """
        part = self.parts[0]
        if len(self.parts) == 1 and isinstance(part, PlainRows) and part.weight.dtype is DType.BFLOAT16:
            return part.weight
        raise ValueError("only a BF16 linear is a table")


def scratch_size(linears: Iterable[CpuLinear]) -> int:
    """float32 elements of scratch that each thread needs for any of `linears`."""
    return max((linear.scratch_size for linear in linears), default=0)


@allocation_helper
def load_linear(parts: Sequence[LinearSource], allocate: Allocate[HostTensor]) -> CpuLinear:
    """One resident linear out of `parts` stacked along N. Neighbours of one format become one run of rows.

    Nothing but the resident bytes is allocated: parts are laid out anew on their way from the mapped file.

    Raises
    ------
    CheckpointError
        The parts differ in K, or K is not what the format asks for.
    """
    layouts = linear_layouts(parts)
    loaded: list[LinearPart] = []
    try:
        for layout in layouts:
            kind = Nvfp4Rows if layout.format is WeightFormat.NVFP4 else PlainRows
            loaded.append(kind.load(layout, allocate))
    except BaseException:
        for part in loaded:
            for tensor in part.tensors:
                tensor.buffer.close()  # the traceback would keep it alive
        raise
    shape = (sum(layout.rows for layout in layouts), layouts[0].columns)
    return CpuLinear(shape, tuple(loaded), max(layout.scratch_size for layout in layouts))
