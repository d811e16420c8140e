"""Tensors in device memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from engine.backend.protocol import DType, Tensor

if TYPE_CHECKING:
    from cuda.core import Buffer

ALIGNMENT = 256
"""Bytes to which a part of a shared buffer is aligned: whole lines of the L2 cache, and more than a read."""


@dataclass(slots=True, eq=False)
class CudaTensor(Tensor):
    """A tensor whose device address is at hand. It may begin inside its buffer, which it keeps alive."""

    address: int = 0

    @classmethod
    def of(cls, buffer: Buffer, shape: tuple[int, ...], dtype: DType, offset: int = 0) -> Self:
        """The tensor that begins `offset` bytes into `buffer`.

        Raises
        ------
        ValueError
            If the buffer ends before the tensor does.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if offset + nbytes > buffer.size:
            raise ValueError(
                f"{shape} of {dtype.label} at byte {offset} does not fit a buffer of {buffer.size} bytes"
            )
        return cls(buffer, shape, dtype, int(buffer.handle) + offset)

    def reshaped(self, *shape: int) -> Self:
        """The same elements in another shape."""
        return replace(self, shape=shape)


def address_of(tensor: Tensor) -> int:
    """Device address of a tensor that this backend made."""
    assert isinstance(tensor, CudaTensor), f"{type(tensor).__name__} is not a CUDA tensor"
    return tensor.address


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment
