"""A device's own memory, opened: runtime, account and resource together."""

from __future__ import annotations

from typing import Literal

from engine.memory.cuda.bypass import BypassBook
from engine.memory.cuda.device import CudaDeviceAccount, NvmlUsage
from engine.memory.cuda.observed import ObservedCudaRuntime
from engine.memory.cuda.resources import CudaMallocMemoryResource, CudaPoolMemoryResource
from engine.memory.cuda.runtime import BoundCudaRuntime, CudaRuntime

__all__ = ["CudaAllocator", "open_cuda_memory"]

CudaAllocator = Literal["malloc", "pool"]


def open_cuda_memory(
    allocator: CudaAllocator = "malloc", device_id: int = 0, *, observe: bool = False
) -> CudaMallocMemoryResource | CudaPoolMemoryResource:
    """The memory of one GPU: by cudaMalloc, or by a stream-ordered pool of our own.

    Creates the device's context; to be called before anything else does, so that its bytes are told from the
    neighbours'. With `observe`, CUPTI watches for memory that goes past the resource.

    Raises
    ------
    CudaCallError
    ConfigurationError
        CUPTI was asked for, and cannot be used.
    """
    runtime: CudaRuntime = BoundCudaRuntime(device_id)
    book = None
    if observe:
        from engine.memory.cuda.cupti_observer import CuptiObserver

        book = BypassBook()
        book.observer = CuptiObserver(book)
        runtime = ObservedCudaRuntime(runtime, book)
    account = CudaDeviceAccount(runtime, NvmlUsage(device_id), book)
    resource = CudaMallocMemoryResource if allocator == "malloc" else CudaPoolMemoryResource
    return resource(account, runtime, device_id)
