"""A device's own memory, opened: runtime, account and resource together."""

from __future__ import annotations

from typing import Literal

from engine.memory.cuda.device import CudaDeviceAccount, NvmlUsage
from engine.memory.cuda.resources import CudaMallocMemoryResource, CudaPoolMemoryResource
from engine.memory.cuda.runtime import BoundCudaRuntime

__all__ = ["CudaAllocator", "open_cuda_memory"]

CudaAllocator = Literal["malloc", "pool"]


def open_cuda_memory(
    allocator: CudaAllocator = "malloc", device_id: int = 0
) -> CudaMallocMemoryResource | CudaPoolMemoryResource:
    """The memory of one GPU: by cudaMalloc, or by a stream-ordered pool of our own.

    Creates the device's context; to be called before anything else does, so that its bytes are told from the
    neighbours'. Raises `CudaCallError`.
    """
    runtime = BoundCudaRuntime(device_id)
    account = CudaDeviceAccount(runtime, NvmlUsage(device_id))
    resource = CudaMallocMemoryResource if allocator == "malloc" else CudaPoolMemoryResource
    return resource(account, runtime, device_id)
