"""Pinned host memory: the way of everything that goes from the host to the device and back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from engine.backend.cuda.device import CudaDevice

if TYPE_CHECKING:
    from cuda.core import Buffer, Event, MemoryResource

CHUNK_BYTES = 16 << 20
"""Size of a staging buffer: large enough for full speed of the bus, small beside any model."""
_COPY_THREADS = min(4, os.cpu_count() or 1)
_SHARED_COPY_BYTES = 1 << 20
"""Copies from this size are shared out to threads: one core is slower than the bus."""


class PinnedBuffer:
    """Page-locked host memory, and whether the device still uses it."""

    def __init__(self, device: CudaDevice, memory: MemoryResource, size: int) -> None:
        self._device = device
        self._buffer: Buffer = device.allocate(memory, size)
        self._event: Event | None = None
        self.size = size
        self.address = int(self._buffer.handle)
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        """uint8 [size], the same memory"""

    def wait(self) -> None:
        """Until all copies that were queued before the last `mark` are done."""
        if self._event is not None:
            self._device.wait(self._event)

    def mark(self) -> None:
        """The device may use the buffer until everything queued so far is done."""
        self._event = self._device.record(self._event)

    def close(self) -> None:
        if not self._device.is_lost:
            self.wait()
        self.array = self.array[:0]
        self._buffer.close()


class Staging:
    """Two pinned buffers in turn: while one is copied to the device the other is filled.

    They are allocated when first needed; `close` gives them back, and a later use takes them again.
    """

    def __init__(self, device: CudaDevice, memory: MemoryResource) -> None:
        self._device = device
        self._memory = memory
        self._buffers: list[PinnedBuffer] = []
        self._turn = 0
        self._threads: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Pinned bytes held now."""
        return sum(buffer.size for buffer in self._buffers)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Queue a copy of `array`'s bytes, of any size, to device memory."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for begin in range(0, flat.size, CHUNK_BYTES):
            self.upload_together(address + begin, [flat[begin : begin + CHUNK_BYTES]])

    def upload_together(self, address: int, arrays: Sequence[np.ndarray]) -> list[int]:
        """Queue a copy of arrays, one after the other, of at most `CHUNK_BYTES`; returns their device
        addresses."""
        buffer = self._next()
        offset, addresses = 0, []
        for array in arrays:
            self._fill(buffer.array[offset : offset + array.nbytes], array.reshape(-1).view(np.uint8))
            addresses.append(address + offset)
            offset += array.nbytes
        self._device.copy_to_device(address, buffer.address, offset)
        buffer.mark()
        return addresses

    def download(self, address: int, size: int) -> np.ndarray:
        """Copy of device memory, uint8 [size]. Waits for everything queued before."""
        result = np.empty(size, np.uint8)
        for begin in range(0, size, CHUNK_BYTES):
            part = result[begin : begin + CHUNK_BYTES]
            buffer = self._next()
            self._device.copy_to_host(buffer.address, address + begin, part.size)
            buffer.mark()
            buffer.wait()
            part[:] = buffer.array[: part.size]
        return result

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _next(self) -> PinnedBuffer:
        if not self._buffers:
            self._buffers = [PinnedBuffer(self._device, self._memory, CHUNK_BYTES) for _ in range(2)]
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        buffer.wait()
        return buffer

    def _fill(self, target: np.ndarray, source: np.ndarray) -> None:
        if source.size < _SHARED_COPY_BYTES:
            target[:] = source
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="vtserve-load")
        step = -(-source.size // _COPY_THREADS)
        pieces = [slice(begin, begin + step) for begin in range(0, source.size, step)]
        for _ in self._threads.map(lambda piece: np.copyto(target[piece], source[piece]), pieces):
            pass
