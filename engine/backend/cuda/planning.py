"""The CUDA backend's `MemoryLayout`. Needs no GPU: the shape of one is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.backend.cuda.layout import DeviceShape
from engine.backend.cuda.reservation import ArrangedActivations, reserve_step
from engine.backend.cuda.segments import SegmentLayout, load_segments
from engine.backend.planning import EmptyTensor, PlannedLinear
from engine.backend.protocol import DType, LinearSource, StepLimits, Tensor, WeightFormat
from engine.memory.scope import allocation_helper, memory_scope

if TYPE_CHECKING:
    from cuda.core import Buffer

__all__ = ["CudaLayout"]


class CudaLayout:
    """What `CudaBackend` allocates on a device of `shape`."""

    name = "cuda"
    activation_dtype = DType.BFLOAT16

    def __init__(self, shape: DeviceShape) -> None:
        self.shape = shape
        self._arranged = ArrangedActivations(shape)

    @allocation_helper
    def load_linear(self, parts: Sequence[LinearSource], empty: EmptyTensor) -> PlannedLinear:
        self._arranged.add(parts)

        @allocation_helper
        def allocate(size: int) -> Buffer:
            return empty((size,), DType.UINT8).buffer

        loaded = load_segments(parts, allocate, _fill_nothing)
        tensors = tuple(Tensor(buffer, (buffer.size,), DType.UINT8) for _, buffer in loaded)
        first, buffer = loaded[0]
        table = None
        if len(loaded) == 1 and first.format is WeightFormat.BF16:
            table = Tensor(buffer, (first.rows, first.columns), DType.BFLOAT16)
        return PlannedLinear((sum(layout.rows for layout, _ in loaded), first.columns), tensors, table)

    def reserve(self, limits: StepLimits, empty: EmptyTensor) -> None:
        @allocation_helper
        def reserve(tag: str, size: int) -> Tensor:
            with memory_scope(tag):
                return empty((size,), DType.UINT8)

        reserve_step(limits, self.shape, self._arranged, reserve)


def _fill_nothing(layout: SegmentLayout, buffer: Buffer, scratch: Buffer | None) -> None:
    """There is nothing behind the buffers."""
