"""Tensors in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from engine.backend.protocol import DType, Tensor

if TYPE_CHECKING:
    from cuda.core import Buffer

__all__ = ["HostTensor", "array_of"]


@dataclass(slots=True, eq=False)
class HostTensor(Tensor):
    """A tensor and a NumPy view of its bytes, in its dtype's carrier.

    The view shares the buffer through DLPack and keeps it alive: the bytes go back when the last of the
    tensor, its `rows` and their arrays is dropped, or at once, under every view, when the buffer is closed.
    """

    array: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, buffer: Buffer, shape: tuple[int, ...], dtype: DType) -> Self:
        """The tensor at the start of `buffer`.

        Raises
        ------
        ValueError
            The buffer is too small.
        """
        raw = np.from_dlpack(buffer).view(np.uint8)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if raw.nbytes < size:
            raise ValueError(f"{shape} of {dtype.label} does not fit a buffer of {raw.nbytes} bytes")
        return cls(buffer, shape, dtype, raw[:size].view(dtype.carrier).reshape(shape))

    def rows(self, count: int) -> Self:
        """The first `count` rows, sharing the buffer. Raises ValueError if there are fewer."""
        if count > self.shape[0]:
            raise ValueError(f"tensor of {self.shape[0]} rows has no first {count}")
        return type(self)(self.buffer, (count, *self.shape[1:]), self.dtype, self.array[:count])


def array_of(tensor: Tensor) -> np.ndarray:
    """NumPy view of a tensor that this backend made."""
    assert isinstance(tensor, HostTensor), f"{type(tensor).__name__} is not in host memory"
    return tensor.array
