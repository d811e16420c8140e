"""A stand-in for a device, in host memory, that does nothing before it is waited for.

What is copied from a buffer that was filled again too early arrives wrong here, as it may on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.core import Buffer, MemoryResource

from tests.backend.cuda.reference import codes_of, pack_fp8, pack_nvfp4


class HostEvent:
    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self.position = 0

    def sync(self) -> None:
        self._stream.run(self.position)


class HostStream:
    """Operations in order, run when somebody waits."""

    is_closed = False

    def __init__(self) -> None:
        self._operations: list[Callable[[], None]] = []
        self._done = 0

    def put(self, operation: Callable[[], None]) -> None:
        self._operations.append(operation)

    def record(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent(self)
        event.position = len(self._operations)
        return event

    def run(self, end: int) -> None:
        for operation in self._operations[self._done : end]:
            operation()
        self._done = max(self._done, end)

    def sync(self) -> None:
        self.run(len(self._operations))


def memory_at(address: int, size: int) -> np.ndarray:
    """uint8 [size], host memory at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class HostDevice:
    """What loading and the step's inputs ask of `CudaDevice`, with NumPy models of the repacking kernels."""

    def __init__(self) -> None:
        self.stream = HostStream()
        self.copied: list[int] = []
        """bytes of each copy to the device"""

    def allocate(self, memory: MemoryResource, size: int) -> Buffer:
        return memory.allocate(size)  # type: ignore[call-arg]  # the host's needs no stream

    def copy_to_device(self, address: int, host: int, size: int) -> None:
        self.copied.append(size)
        self.stream.put(lambda: np.copyto(memory_at(address, size), memory_at(host, size)))

    def copy_to_host(self, host: int, address: int, size: int) -> None:
        self.stream.put(lambda: np.copyto(memory_at(host, size), memory_at(address, size)))

    is_lost = False

    def synchronize(self) -> None:
        self.stream.sync()

    def record(self, event: HostEvent | None = None) -> HostEvent:
        return self.stream.record(event)

    def wait(self, event: HostEvent) -> None:
        event.sync()

    def clear(self, address: int, size: int) -> None:
        self.stream.put(lambda: memory_at(address, size).fill(0))

    def kernel(self, module: str, name: str, *, shared_bytes: int = 0) -> str:
        return name

    def launch(self, kernel: str, grid: tuple[int, ...], block: int, *arguments: Any, **_: Any) -> None:
        self.stream.put(lambda: self._repack(kernel, grid, *arguments))

    @staticmethod
    def _repack(kernel: str, grid: tuple[int, ...], *arguments: int) -> None:
        *sources, resident, first_row, rows, columns, units, row_blocks = arguments
        assert grid == (units, (first_row + rows - 1) // 16 - first_row // 16 + 1)
        place = slice(first_row, first_row + rows)
        if kernel == "repack_nvfp4":
            codes = np.zeros((row_blocks * 16, columns), np.uint8)
            scales = np.zeros((row_blocks * 16, columns // 16), np.uint8)
            codes[place] = codes_of(memory_at(sources[0], rows * columns // 2).reshape(rows, -1))
            scales[place] = memory_at(sources[1], rows * columns // 16).reshape(rows, -1)
            packed = pack_nvfp4(codes, scales)
        else:
            weight = np.zeros((row_blocks * 16, columns), np.uint8)
            weight[place] = memory_at(sources[0], rows * columns).reshape(rows, -1)
            packed = pack_fp8(weight)
        memory_at(resident, packed.size)[:] |= packed
