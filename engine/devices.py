"""The devices an engine can be built on: where their memory comes from, and which backend runs there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from cuda.core import MemoryResource

from engine.backend.protocol import Backend
from engine.config import EngineConfig
from engine.directories import cache_directory
from engine.errors import ConfigurationError
from engine.memory.resources import HostMemoryResource, host_capacity

__all__ = ["CpuDevice", "Device", "GpuDevice", "choose_device"]

_log = logging.getLogger(__name__)


class Device(Protocol):
    """What the composition root asks of a device."""

    @property
    def name(self) -> str:
        """``cpu`` or ``cuda``"""

    @property
    def capacity(self) -> int:
        """Bytes that an injected resource is taken to have, if it cannot tell."""

    def open_memory(self, *, observe: bool = False) -> MemoryResource:
        """The device's own resource; with `observe`, one that learns of memory that goes past it."""

    def can_use(self, memory: MemoryResource) -> bool:
        """Whether the backend can read and write what `memory` hands out."""

    def open_backend(self, memory: MemoryResource) -> Backend:
        """The backend, which asks for every byte through `memory`."""


class CpuDevice:
    """The host: its memory with a capacity, NumPy and numba. A `Device`."""

    name = "cpu"

    def __init__(self, config: EngineConfig) -> None:
        self.capacity = config.device_memory or host_capacity()
        self._threads = config.threads

    def open_memory(self, *, observe: bool = False) -> MemoryResource:
        return HostMemoryResource(self.capacity)

    def can_use(self, memory: MemoryResource) -> bool:
        return bool(memory.is_host_accessible)

    def open_backend(self, memory: MemoryResource) -> Backend:
        # numba takes a while to import; a refused flag or a broken checkpoint need not wait for it.
        from engine.backend.cpu.backend import CpuBackend

        return CpuBackend(memory, threads=self._threads)


class GpuDevice:
    """A CUDA device. A `Device`.

    Raises
    ------
    ConfigurationError
        There is no usable GPU, driver or compiler.
    """

    name = "cuda"

    def __init__(self, config: EngineConfig, environ: Mapping[str, str], index: int = 0) -> None:
        # Nothing of CUDA is imported where the CPU is asked for.
        from engine.backend.cuda.compiler import compiler_version
        from engine.backend.cuda.requirements import check_device

        self.capacity = check_device(index)
        compiler_version()
        self._index = index
        self._allocator = config.cuda_allocator
        self._graphs = not config.enforce_eager
        cache = cache_directory(environ)
        self._kernels = None if cache is None else cache / "kernels"

    def open_memory(self, *, observe: bool = False) -> MemoryResource:
        from engine.memory.cuda.opening import open_cuda_memory
        from engine.memory.cuda.runtime import CudaCallError

        try:
            return open_cuda_memory(self._allocator, self._index, observe=observe)
        except CudaCallError as error:
            raise ConfigurationError(f"--device cuda: the GPU cannot be used: {error}") from error

    def can_use(self, memory: MemoryResource) -> bool:
        return bool(memory.is_device_accessible)

    def open_backend(self, memory: MemoryResource) -> Backend:
        from engine.backend.cuda.backend import CudaBackend

        return CudaBackend(memory, device=self._index, cache_dir=self._kernels, graphs=self._graphs)


def choose_device(config: EngineConfig, environ: Mapping[str, str]) -> Device:
    """The device of ``--device``; ``auto`` is a GPU if there is a usable one.

    Raises
    ------
    ConfigurationError
        ``cuda`` was asked for, and cannot be had.
    """
    if config.device == "cpu":
        return CpuDevice(config)
    try:
        return GpuDevice(config, environ)
    except (ConfigurationError, ImportError) as error:
        if config.device == "cuda":
            raise ConfigurationError(str(error)) from error
        _log.info("running on the CPU: %s", error)
        return CpuDevice(config)
