"""One CUDA device: its limits, its stream, and how kernels are launched on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.backend.cuda.compiler import KernelCompiler, architecture
from engine.errors import ConfigurationError, EngineError
from engine.memory.scope import allocation_helper

if TYPE_CHECKING:
    from pathlib import Path

    from cuda.core import Buffer, Device, Kernel, LaunchConfig, MemoryResource, ObjectCode, Stream

MINIMUM_DRIVER = (13, 0)
"""the CUDA version a driver must know: cuda.core and the compiler are of that generation"""
_STATIC_SHARED_BYTES = 48 << 10
"""shared memory that a block gets without asking for more"""


def open_device(index: int) -> Device:
    """The device, made current.

    Raises
    ------
    ConfigurationError
        If there is no driver, it is too old, or there is no such GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigurationError(
            "--device cuda: cuda-bindings is needed; pip install 'vtserve[cuda]'"
        ) from error
    from cuda.core import Device

    try:
        status, version = driver.cuDriverGetVersion()
        (initialized,) = driver.cuInit(0)
    except RuntimeError as error:  # the driver library is absent
        raise ConfigurationError(f"--device cuda: no NVIDIA driver was found ({error})") from error
    found = (version // 1000, version % 1000 // 10) if int(status) == 0 else (0, 0)
    if found < MINIMUM_DRIVER:
        knows, needed = (".".join(map(str, pair)) for pair in (found, MINIMUM_DRIVER))
        raise ConfigurationError(f"--device cuda: the driver knows CUDA {knows}, {needed} or newer is needed")
    if int(initialized) != 0:
        raise ConfigurationError(f"--device cuda: the driver finds no usable GPU ({initialized.name})")
    _, count = driver.cuDeviceGetCount()
    if index >= count:
        raise ConfigurationError(f"--device cuda: GPU {index} was asked for, the driver finds {count}")
    device = Device(index)
    device.set_current()
    return device


class CudaDevice:
    """The current device, the engine's one stream on it, and its loaded kernels."""

    def __init__(self, index: int, cache_dir: Path | None) -> None:
        self.device = open_device(index)
        capability = self.device.compute_capability
        properties = self.device.properties
        self.index = index
        self.compiler = KernelCompiler(architecture((capability.major, capability.minor)), cache_dir)
        self.multiprocessors: int = properties.multiprocessor_count
        self.shared_bytes: int = properties.max_shared_memory_per_block_optin
        self.stream: Stream = self.device.create_stream()
        self._overlaps = capability.major >= 9
        self._modules: dict[str, ObjectCode] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._configs: dict[tuple[Any, ...], LaunchConfig] = {}

    @allocation_helper
    def allocate(self, memory: MemoryResource, size: int) -> Buffer:
        """`size` bytes of `memory` whose use, and free, are ordered by the stream."""
        return memory.allocate(size, stream=self.stream)

    def load(self, name: str, source: str | None = None) -> None:
        """Compile ``kernels/NAME.cu``, or `source`, so that `kernel` finds what is in it."""
        if name not in self._modules:
            self._modules[name] = self.compiler.module(name, source)

    def kernel(self, module: str, name: str, *, shared_bytes: int = 0) -> Kernel:
        """A kernel of a loaded module that may ask for up to `shared_bytes` of dynamic shared memory."""
        kernel = self._kernels.get((module, name))
        if kernel is None:
            kernel = self._modules[module].get_kernel(name)
            if shared_bytes > _STATIC_SHARED_BYTES:
                from cuda.bindings import driver

                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, self.index)
                _check(status, f"asking for {shared_bytes} bytes of shared memory for {name}")
            self._kernels[module, name] = kernel
        return kernel

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        block: int,
        *arguments: Any,
        shared_bytes: int = 0,
        overlap: bool = True,
    ) -> None:
        """Launch on the stream.

        An argument that is an int (and no bool) is a pointer or an int, `numpy.float32` is a float.
        `overlap`: the kernel begins with griddepcontrol.wait, so it may be brought up while the one before
        it runs.
        """
        from cuda.core import LaunchConfig, launch

        key = (grid, block, shared_bytes, overlap)
        config = self._configs.get(key)
        if config is None:
            if len(self._configs) > 4096:
                self._configs.clear()
            config = LaunchConfig(
                grid=grid,
                block=block,
                shmem_size=shared_bytes,
                programmatic_stream_serialization=overlap and self._overlaps,
            )
            self._configs[key] = config
        launch(self.stream, config, kernel, *arguments)

    def copy_to_device(self, address: int, host: int, size: int) -> None:
        """Queue a copy from host memory, which must stay as it is until the copy is done."""
        from cuda.bindings import driver

        (status,) = driver.cuMemcpyHtoDAsync(address, host, size, self.stream.handle)
        _check(status, "copy to the device")

    def copy_to_host(self, host: int, address: int, size: int) -> None:
        """Queue a copy to host memory."""
        from cuda.bindings import driver

        (status,) = driver.cuMemcpyDtoHAsync(host, address, size, self.stream.handle)
        _check(status, "copy to the host")

    def clear(self, address: int, size: int) -> None:
        """Queue zeroing of device memory."""
        from cuda.bindings import driver

        (status,) = driver.cuMemsetD8Async(address, 0, size, self.stream.handle)
        _check(status, "clearing device memory")

    def close(self) -> None:
        """Forget kernels and stream. Idempotent."""
        self._kernels.clear()
        self._modules.clear()
        self._configs.clear()
        if not self.stream.is_closed:
            self.stream.close()


def _check(status: Any, what: str) -> None:
    if int(status) != 0:
        raise EngineError(f"CUDA: {what} failed ({status.name})")
