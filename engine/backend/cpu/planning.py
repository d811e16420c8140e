"""The CPU backend's `MemoryLayout`."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backend.cpu.layout import linear_layouts, reserve_step
from engine.backend.planning import EmptyTensor, PlannedLinear
from engine.backend.protocol import DType, LinearSource, StepLimits, WeightFormat
from engine.memory.scope import allocation_helper

__all__ = ["CpuLayout"]


class CpuLayout:
    """What `CpuBackend` allocates on `threads` threads."""

    name = "cpu"
    activation_dtype = DType.FLOAT32

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._scratch = 0

    @allocation_helper
    def load_linear(self, parts: Sequence[LinearSource], empty: EmptyTensor) -> PlannedLinear:
        layouts = linear_layouts(parts)
        tensors = [tensor for layout in layouts for tensor in layout.allocate(empty)]
        self._scratch = max(self._scratch, *(layout.scratch_size for layout in layouts))
        is_table = len(layouts) == 1 and layouts[0].format is WeightFormat.BF16
        shape = (sum(layout.rows for layout in layouts), layouts[0].columns)
        return PlannedLinear(shape, tuple(tensors), tensors[0] if is_table else None)

    def reserve(self, limits: StepLimits, empty: EmptyTensor) -> None:
        reserve_step(limits, self.threads, self._scratch, empty)
