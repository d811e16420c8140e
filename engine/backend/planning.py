"""A backend that only allocates: what a load asks of a device, with nothing behind the addresses.

It takes the place of a real one under the loader and the model, over a resource that hands out no memory.
What is asked for, in which order and under which tags, is decided by the same functions as on the device
itself; each kind of device gives them as a `MemoryLayout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.backend.protocol import DType, LinearSource, StepLimits, Tensor
from engine.memory.scope import allocation_helper

if TYPE_CHECKING:
    import numpy as np
    from cuda.core import MemoryResource

__all__ = ["EmptyTensor", "MemoryLayout", "PlannedLinear", "PlanningBackend"]

EmptyTensor = Callable[[tuple[int, ...], DType], Tensor]
"""Makes an uninitialised tensor"""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLinear:
    """A `Linear` that cannot multiply."""

    shape: tuple[int, int]
    tensors: tuple[Tensor, ...]
    """everything that is resident"""
    table: Tensor | None
    """the weight as an embedding table, if it is stored as one"""

    @property
    def nbytes(self) -> int:
        """Resident bytes, scales and bias included."""
        return sum(tensor.buffer.size for tensor in self.tensors)


class MemoryLayout(Protocol):
    """What the backend of a kind of device allocates."""

    name: str
    """the backend's"""
    activation_dtype: DType

    def load_linear(self, parts: Sequence[LinearSource], empty: EmptyTensor) -> PlannedLinear:
        """As `Backend.load_linear`."""

    def reserve(self, limits: StepLimits, empty: EmptyTensor) -> None:
        """As `Backend.reserve`, for the layers that were loaded."""


class PlanningBackend:
    """The part of `Backend` that allocates.

    Parameters
    ----------
    memory
        Hands out addresses. Nothing is ever read or written there.
    layout
        The device's.
    """

    def __init__(self, memory: MemoryResource, layout: MemoryLayout) -> None:
        self.name = layout.name
        self.activation_dtype = layout.activation_dtype
        self._memory = memory
        self._layout = layout
        self._reserved: list[Tensor] = []

    @allocation_helper
    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """A tensor without contents, tagged by the current memory scope."""
        size = math.prod(shape) * dtype.itemsize
        return Tensor(self._memory.allocate(size, stream=None), shape, dtype)

    @allocation_helper
    def from_host(self, array: np.ndarray, dtype: DType) -> Tensor:
        """A tensor of `array`'s shape."""
        return self.empty(array.shape, dtype)

    @allocation_helper
    def load_linear(self, parts: Sequence[LinearSource]) -> PlannedLinear:
        """A linear layer of which nothing is loaded."""
        return self._layout.load_linear(parts, self.empty)

    def as_table(self, linear: PlannedLinear) -> Tensor:
        """The linear's own bytes as an embedding table. Raises ValueError if it is not stored as one."""
        if linear.table is None:
            raise ValueError("only a BF16 linear is a table")
        return linear.table

    def reserve(self, limits: StepLimits) -> None:
        """Ask for what steps up to `limits` need."""
        self._layout.reserve(limits, self._reserve)

    @allocation_helper
    def _reserve(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        tensor = self.empty(shape, dtype)
        self._reserved.append(tensor)
        return tensor

    def close(self) -> None:
        """Give back what the backend itself holds. Idempotent."""
        while self._reserved:
            self._reserved.pop().buffer.close()
