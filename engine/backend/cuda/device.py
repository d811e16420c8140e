"""One CUDA device: its limits, its stream, and how kernels are launched on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from engine.backend.cuda.compiler import KernelCompiler, architecture
from engine.backend.cuda.layout import DeviceShape
from engine.backend.cuda.requirements import open_device
from engine.errors import DeviceError, DeviceLostError
from engine.memory.cuda.device import CudaDeviceAccount, DeviceHealth
from engine.memory.cuda.runtime import CudaCallError
from engine.memory.scope import allocation_helper

if TYPE_CHECKING:
    from pathlib import Path

    from cuda.core import Buffer, Event, Kernel, LaunchConfig, MemoryResource, ObjectCode, Stream
    from cuda.core.graph import Graph, GraphBuilder

T = TypeVar("T")

_STATIC_SHARED_BYTES = 48 << 10
"""shared memory that a block gets without asking for more"""


def is_out_of_memory(error: DeviceError) -> bool:
    """The driver found no memory for something of its own."""
    from cuda.bindings import driver

    return error.code == int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)


class CudaDevice:
    """The current device, the engine's one stream on it, and its loaded kernels.

    A call of CUDA's that fails ends in `DeviceError`; in `DeviceLostError` if the context is lost with it.
    From then on every method raises that, and CUDA is asked nothing more.

    Parameters
    ----------
    account
        Is told of the device's loss, and counts what kernels take of its memory. None where nobody counts.
    """

    def __init__(self, index: int, cache_dir: Path | None, account: CudaDeviceAccount | None = None) -> None:
        self.device = open_device(index)
        capability = self.device.compute_capability
        properties = self.device.properties
        self.index = index
        self.account = account
        self.health = DeviceHealth() if account is None else account.health
        self.compiler = KernelCompiler(architecture((capability.major, capability.minor)), cache_dir)
        self.shape = DeviceShape(
            multiprocessors=properties.multiprocessor_count,
            shared_bytes=properties.max_shared_memory_per_block_optin,
            hopper=self.compiler.arch == "sm_90a",
        )
        self.multiprocessors = self.shape.multiprocessors
        self.shared_bytes = self.shape.shared_bytes
        self.stream: Stream = self.device.create_stream()
        self._queue: Stream | GraphBuilder = self.stream
        """where kernels are launched: the stream, or what captures it"""
        self._overlaps = capability.major >= 9
        self._modules: dict[str, ObjectCode] = {}
        self._loaded: set[str] = set()
        """modules whose code is on the device"""
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
            self._bring(module)
            kernel = self._kernels[module, name] = self._load_kernel(module, name, shared_bytes)
        return kernel

    def load_kernels(self) -> None:
        """Bring all code of all modules to the device."""
        with self._library_step():
            for name in self._modules:
                self._bring(name)

    def _bring(self, name: str) -> None:
        """Bring a module's code and variables to the device, if they are not there.

        The driver would do so when a kernel is first launched: in a step, where nothing may be allocated, and
        where the bytes would be nobody's.
        """
        if name not in self._loaded:
            with self._library_step():
                self._load_module(name, self._modules[name])
            self._loaded.add(name)

    def _load_module(self, name: str, module: ObjectCode) -> None:
        from cuda.bindings import driver

        self._check_alive()
        library = driver.CUlibrary(int(module.handle))
        status, count = driver.cuLibraryGetKernelCount(library)
        self._check(status, f"loading {name}")
        status, kernels = driver.cuLibraryEnumerateKernels(count, library)
        self._check(status, f"loading {name}")
        for kernel in kernels:
            status, function = driver.cuKernelGetFunction(kernel)
            self._check(status, f"loading {name}")
            (status,) = driver.cuFuncLoad(function)
            self._check(status, f"loading {name}")

    def _library_step(self) -> AbstractContextManager[None]:
        return nullcontext() if self.account is None else self.account.library_step()

    def _load_kernel(self, module: str, name: str, shared_bytes: int) -> Kernel:
        from cuda.bindings import driver

        self._check_alive()
        try:
            kernel = self._modules[module].get_kernel(name)
        except Exception as error:
            self._failed(f"loading {name}", error)
        if shared_bytes > _STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, self.index)
            self._check(status, f"asking for {shared_bytes} bytes of shared memory for {name}")
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
        self._check_alive()
        try:
            launch(self._queue, config, kernel, *arguments)
        except Exception as error:
            self._failed("a kernel launch", error)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """A graph of all kernels that `work` launches, none of which runs now; and what `work` returns.

        What the graph takes of the device's memory is counted as the libraries'. Waits for the device.
        """
        from cuda.core.graph import GraphCompleteOptions

        self._check_alive()
        with self._library_step():
            builder = self.stream.create_graph_builder()
            try:
                self._queue = builder.begin_building()
                result = work()
                builder.end_building()
                # Uploaded now: its first launch would take the memory otherwise, where nobody counts it.
                graph = builder.complete(GraphCompleteOptions(upload_stream=self.stream))
            except Exception as error:
                self._failed("capturing a graph", error)
            finally:
                self._queue = self.stream
                with suppress(Exception):  # after a capture that failed it says so once more
                    builder.close()
        return graph, result

    def launch_graph(self, graph: Graph) -> None:
        """Queue a captured graph."""
        self._check_alive()
        try:
            graph.launch(self.stream)
        except Exception as error:
            self._failed("a graph launch", error)

    def close_graphs(self, graphs: Iterable[Graph]) -> None:
        """Let go of captured graphs. Waits for the device."""
        if self.is_lost:
            return
        with self._library_step():
            self.synchronize()
            for graph in graphs:
                graph.close()

    def copy_to_device(self, address: int, host: int, size: int) -> None:
        """Queue a copy from host memory, which must stay as it is until the copy is done."""
        from cuda.bindings import driver

        self._check_alive()
        (status,) = driver.cuMemcpyHtoDAsync(address, host, size, self.stream.handle)
        self._check(status, "copy to the device")

    def copy_to_host(self, host: int, address: int, size: int) -> None:
        """Queue a copy to host memory."""
        from cuda.bindings import driver

        self._check_alive()
        (status,) = driver.cuMemcpyDtoHAsync(host, address, size, self.stream.handle)
        self._check(status, "copy to the host")

    def clear(self, address: int, size: int) -> None:
        """Queue zeroing of device memory."""
        from cuda.bindings import driver

        self._check_alive()
        (status,) = driver.cuMemsetD8Async(address, 0, size, self.stream.handle)
        self._check(status, "clearing device memory")

    def synchronize(self) -> None:
        """Wait until everything queued is done. Errors of kernels come out here."""
        from cuda.bindings import driver

        self._check_alive()
        (status,) = driver.cuStreamSynchronize(self.stream.handle)
        self._check(status, "waiting for the device")

    def record(self, event: Event | None = None) -> Event:
        """An event (`event` again, if given) that is reached when everything queued so far is done."""
        self._check_alive()
        try:
            return self.stream.record(event)
        except Exception as error:
            self._failed("recording an event", error)

    def wait(self, event: Event) -> None:
        """Until `event` is reached."""
        self._check_alive()
        try:
            event.sync()
        except Exception as error:
            self._failed("waiting for the device", error)

    def close(self) -> None:
        """Forget kernels and stream. Idempotent."""
        self._kernels.clear()
        self._modules.clear()
        self._loaded.clear()
        self._configs.clear()
        if not self.stream.is_closed and self.health.lost is None:
            self.stream.close()

    # -- errors --------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the context is lost."""
        return self.health.lost is not None

    def _check_alive(self) -> None:
        lost = self.health.lost
        if lost is not None:
            raise DeviceLostError(
                f"the CUDA context is lost ({lost.call}: {lost.text}); a new process is needed",
                code=lost.code,
            )

    def _check(self, status: Any, what: str) -> None:
        if int(status) != 0:
            self._raise(what, int(status), str(status.name))

    def _failed(self, what: str, error: Exception) -> NoReturn:
        """Turn an exception of cuda.core into ours.

        Its type is private; its text begins with the error's name.
        """
        from cuda.bindings import driver

        name = str(error).partition(":")[0].strip()
        status = getattr(driver.CUresult, name, None) if name.startswith("CUDA_ERROR_") else None
        if status is None:
            raise error
        self._raise(what, int(status), name)

    def _raise(self, what: str, code: int, name: str) -> NoReturn:
        # The driver's numbers are the runtime's for every error after which the context is lost.
        self.health.note(CudaCallError(what, code, name))
        if self.is_lost:
            raise DeviceLostError(
                f"CUDA: {what} failed ({name}): an earlier kernel's error, after which the context is lost",
                code=code,
            )
        raise DeviceError(f"CUDA: {what} failed ({name})", code=code)
