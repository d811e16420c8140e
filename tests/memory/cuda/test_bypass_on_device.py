"""CUPTI as the observer, on a device: what goes past the allocator is found, and nothing that is ours.

CUPTI should watch from before the context is made, so these tests want a process of their own:
``pytest -m gpu tests/memory/cuda/test_bypass_on_device.py``. Elsewhere in a run they still hold.
"""

from __future__ import annotations

import ctypes
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.memory.errors import ConfigurationError, OutOfMemoryError
from engine.memory.house import MemoryHouse
from engine.memory.settings import TraceSettings

pytestmark = pytest.mark.gpu

MIB = 1 << 20
RESIDUAL = 8 * MIB
"""what CUPTI's own buffers, and a pool's and a step's rounding may add"""
GLOBAL = 'extern "C" { __device__ char planted[16 << 20]; __global__ void touch() { planted[0] = 1; } }'


class Observed:
    """An allocator that is observed, in its house."""

    def __init__(self, allocator: Any) -> None:
        from engine.memory.cuda.opening import open_cuda_memory

        self.memory = open_cuda_memory(allocator, observe=True)
        self.output = io.StringIO()
        settings = TraceSettings(trace=True, stats=True, records=4096, observe=True)
        self.house = MemoryHouse.build(self.memory, settings, output=self.output)

    @property
    def bypasses(self) -> list[str]:
        """Lines, as of now."""
        self.memory.account.settle()
        return [line for line in self.output.getvalue().splitlines() if "BYPASS" in line]


@pytest.fixture(params=["malloc", "pool"])
def observed(request: pytest.FixtureRequest) -> Iterator[Observed]:
    from engine.backend.cuda.requirements import check_device
    from engine.memory.cuda.runtime import CudaCallError

    pytest.importorskip("cupti", reason="cupti-python is not installed: vtserve[observe]")
    try:
        check_device(0)  # makes no context: CUPTI is to watch from before
        observed = Observed(request.param)
    except (ConfigurationError, CudaCallError) as error:
        pytest.skip(f"no device that CUPTI observes: {error}")
    observed.bypasses.clear()
    yield observed
    observed.memory.close()
    observed.house.close()


def called(result: tuple[Any, ...]) -> Any:
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


def test_what_is_ours_is_not_taken_for_a_bypass(observed: Observed) -> None:
    before = observed.bypasses
    resource = observed.house.resource
    sizes = [0, 1, 1000, 4096, MIB, 5 * MIB + 3, 64 * MIB, 700 * MIB]
    for _ in range(3):
        blocks = [(resource.acquire(size, None), size) for size in sizes]
        for ptr, size in blocks[::2] + blocks[1::2]:
            resource.release(ptr, size, None)
    assert observed.bypasses == before
    assert observed.house.ledger().bypass == 0


def test_a_cudamalloc_behind_the_allocators_back_is_found(observed: Observed) -> None:
    from cuda.bindings import runtime

    held = observed.house.resource.acquire(32 * MIB, None)
    before = observed.house.ledger()
    ptr = called(runtime.cudaMalloc(48 * MIB))
    after = observed.house.ledger()
    assert after.bypass == before.bypass + 48 * MIB
    assert abs(after.residual - before.residual) <= RESIDUAL
    assert re.search(r"^\[cuda-alloc\] BYPASS size=48\.0 MiB kind=device name=\S", observed.bypasses[-1])
    called(runtime.cudaFree(ptr))
    assert observed.house.ledger().bypass == before.bypass
    observed.house.resource.release(held, 32 * MIB, None)


def test_a_cudamallocasync_behind_the_allocators_back_is_found(observed: Observed) -> None:
    from cuda.bindings import runtime

    before = observed.house.ledger()
    ptr = called(runtime.cudaMallocAsync(40 * MIB, 0))
    called(runtime.cudaDeviceSynchronize())
    after = observed.house.ledger()
    assert re.search(r"BYPASS size=40\.0 MiB kind=device_async name=\S", observed.bypasses[-1])
    # The default pool grows in steps of 32 MiB: all of it counts.
    assert after.bypass - before.bypass == 64 * MIB
    assert abs(after.residual - before.residual) <= RESIDUAL
    called(runtime.cudaFreeAsync(ptr, 0))
    called(runtime.cudaDeviceSynchronize())
    last = observed.house.ledger()
    assert last.bypass == before.bypass
    assert abs(last.residual - before.residual) <= RESIDUAL


def test_what_others_take_of_our_pool_is_found_and_counted_once(observed: Observed) -> None:
    from cuda.bindings import runtime

    if observed.memory.read_pool() is None:
        pytest.skip("this allocator has no pool")
    held = observed.house.resource.acquire(32 * MIB, None)
    before = observed.house.ledger()
    ptr = called(runtime.cudaMallocFromPoolAsync(20 * MIB, observed.memory._pool, 0))
    after = observed.house.ledger()
    assert re.search(r"BYPASS size=20\.0 MiB kind=device_async name=\S", observed.bypasses[-1])
    assert after.bypass == before.bypass, "the pool's own figures have it"
    assert abs(after.residual - before.residual) <= RESIDUAL
    called(runtime.cudaFreeAsync(ptr, 0))
    observed.house.resource.release(held, 32 * MIB, None)


def test_what_a_graph_takes_is_found(observed: Observed) -> None:
    from cuda.bindings import runtime

    before = observed.house.ledger()
    stream = called(runtime.cudaStreamCreate())
    called(runtime.cudaStreamBeginCapture(stream, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed))
    ptr = called(runtime.cudaMallocAsync(24 * MIB, stream))
    graph = called(runtime.cudaStreamEndCapture(stream))
    ready = called(runtime.cudaGraphInstantiate(graph, 0))
    called(runtime.cudaGraphLaunch(ready, stream))
    called(runtime.cudaStreamSynchronize(stream))
    after = observed.house.ledger()
    new = observed.bypasses[-2:]
    assert "size=32.0 MiB kind=graph_reserve" in new[0]
    assert "size=24.0 MiB kind=device_async" in new[1]
    assert after.bypass - before.bypass == 32 * MIB
    assert abs(after.residual - before.residual) <= RESIDUAL
    called(runtime.cudaFreeAsync(ptr, stream))
    called(runtime.cudaStreamSynchronize(stream))
    called(runtime.cudaGraphExecDestroy(ready))
    called(runtime.cudaGraphDestroy(graph))
    called(runtime.cudaDeviceGraphMemTrim(0))
    assert observed.house.ledger().bypass == before.bypass
    called(runtime.cudaStreamDestroy(stream))


def test_what_a_library_takes_is_found_by_the_librarys_name(observed: Observed) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    try:
        loaded = pathfinder.load_nvidia_dynamic_lib("cublas")
    except pathfinder.DynamicLibNotFoundError as error:
        pytest.skip(f"no library that allocates: {error}")
    cublas = ctypes.CDLL(loaded.abs_path)
    before = observed.house.ledger()
    handle = ctypes.c_void_p()
    assert cublas.cublasCreate_v2(ctypes.byref(handle)) == 0
    after = observed.house.ledger()
    taken = before.free - after.free
    found = [line for line in observed.bypasses if "cublas" in line]
    assert found or taken == 0
    assert abs(after.residual - before.residual) <= 64 * MIB
    assert cublas.cublasDestroy_v2(handle) == 0


def test_a_modules_variable_is_found_by_its_name(observed: Observed) -> None:
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    arch = "".join(map(str, device.compute_capability))
    code = Program(GLOBAL, "c++", ProgramOptions(arch=f"sm_{arch}")).compile("cubin")
    before = observed.house.ledger()
    with observed.memory.account.library_step():
        # The driver brings a module's code and variables when a kernel of it is first launched.
        launch(device.default_stream, LaunchConfig(grid=1, block=1), code.get_kernel("touch"))
        device.sync()
    after = observed.house.ledger()
    found = [line for line in observed.bypasses if "planted" in line]
    assert len(found) == 1
    assert re.search(r"size=16\.0 MiB kind=device_static name=planted step=library", found[0])
    assert after.library - before.library >= 16 * MIB
    assert after.bypass == before.bypass, "the library's entry has it"
    assert abs(after.residual - before.residual) <= RESIDUAL


def test_refusals_behind_the_allocators_back_are_found_and_ours_are_none(observed: Observed) -> None:
    from cuda.bindings import driver, runtime

    too_much = 1 << 43
    before = observed.house.ledger()
    with pytest.raises(OutOfMemoryError):
        observed.house.resource.acquire(too_much, None)
    assert [line for line in observed.bypasses if "failed=yes" in line] == []
    assert int(runtime.cudaMalloc(too_much)[0]) == 2
    assert int(runtime.cudaMallocAsync(too_much, 0)[0]) == 2
    assert int(driver.cuMemAlloc(too_much)[0]) == 2
    runtime.cudaGetLastError()
    names = [
        match[1]
        for line in observed.bypasses
        if (match := re.search(r"size=8388608\.0 MiB kind=device name=(\w+) failed=yes code=2", line))
    ]
    assert names == ["cudaMalloc", "cudaMallocAsync", "cuMemAlloc"]
    # What the failing pool request grew over is given back.
    called(runtime.cudaDeviceSynchronize())
    after = observed.house.ledger()
    assert after.bypass == before.bypass
    assert abs(after.residual - before.residual) <= RESIDUAL
