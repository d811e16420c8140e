"""Tensors in host memory, and when their bytes go back."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from engine.backend.cpu.tensor import HostTensor, array_of
from engine.backend.protocol import DType, Tensor
from engine.memory.resources import HostMemoryResource


@pytest.fixture
def memory() -> HostMemoryResource:
    return HostMemoryResource(1 << 20)


@pytest.mark.parametrize("dtype", DType)
def test_the_view_is_of_the_buffers_own_bytes(memory: HostMemoryResource, dtype: DType) -> None:
    tensor = HostTensor.of(memory.allocate(3 * 5 * dtype.itemsize), (3, 5), dtype)
    assert tensor.array.dtype == dtype.carrier
    assert tensor.array.shape == (3, 5)
    assert tensor.array.flags.c_contiguous
    assert tensor.array.flags.writeable
    assert tensor.array.ctypes.data == int(tensor.buffer.handle)
    assert tensor.array.nbytes == tensor.nbytes


def test_first_rows_share_the_buffer(memory: HostMemoryResource) -> None:
    tensor = HostTensor.of(memory.allocate(4 * 6 * 4), (4, 6), DType.FLOAT32)
    rows = tensor.rows(2)
    assert isinstance(rows, HostTensor)
    assert rows.shape == rows.array.shape == (2, 6)
    assert rows.buffer is tensor.buffer
    rows.array[:] = 7
    assert (tensor.array[:2] == 7).all()
    assert tensor.rows(0).array.shape == (0, 6)
    with pytest.raises(ValueError, match="tensor of 4 rows has no first 5"):
        tensor.rows(5)


def test_empty_and_larger_buffers(memory: HostMemoryResource) -> None:
    assert HostTensor.of(memory.allocate(0), (0, 8), DType.FLOAT32).array.shape == (0, 8)
    assert HostTensor.of(memory.allocate(100), (3,), DType.INT64).array.shape == (3,)
    with pytest.raises(ValueError, match=r"\(4,\) of int64 does not fit a buffer of 31 bytes"):
        HostTensor.of(memory.allocate(31), (4,), DType.INT64)


def test_the_last_view_that_is_dropped_gives_the_bytes_back(memory: HostMemoryResource) -> None:
    tensor = HostTensor.of(memory.allocate(64), (16,), DType.FLOAT32)
    view = tensor.rows(3).array
    gc.disable()  # counting references must be enough
    try:
        del tensor
        assert memory.live == 64
        del view
        assert memory.live == 0
    finally:
        gc.enable()


def test_closing_gives_the_bytes_back_under_views(memory: HostMemoryResource) -> None:
    tensor = HostTensor.of(memory.allocate(64), (16,), DType.FLOAT32)
    rows = tensor.rows(4)
    tensor.buffer.close()
    assert memory.live == 0
    del tensor, rows
    gc.collect()
    assert memory.live == 0


def test_another_backends_tensor_is_refused(memory: HostMemoryResource) -> None:
    with pytest.raises(AssertionError, match="Tensor is not in host memory"):
        array_of(Tensor(memory.allocate(4), (1,), DType.FLOAT32))
    assert array_of(HostTensor.of(memory.allocate(4), (1,), DType.FLOAT32)).dtype == np.float32
