"""The calls of the CUDA runtime that the memory house makes, each checked, each naming itself when it fails.

The house is handed a `CudaRuntime`, so its reactions to a full pool, a neighbour or a lost context can be
tested where there is no device.
"""

from __future__ import annotations

from typing import Any, Protocol

from cuda.bindings import runtime as cudart

__all__ = ["OUT_OF_MEMORY", "BoundCudaRuntime", "CudaCallError", "CudaRuntime", "is_sticky"]

OUT_OF_MEMORY = int(cudart.cudaError_t.cudaErrorMemoryAllocation)

_STICKY_NAMES = (
    # Errors after which the context is lost: "the process must be terminated and relaunched" in the
    # runtime's own description of each (CUDA Runtime API, cudaError_t).
    "cudaErrorECCUncorrectable",
    "cudaErrorNvlinkUncorrectable",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchTimeout",
    "cudaErrorContextIsDestroyed",
    "cudaErrorAssert",
    "cudaErrorHardwareStackError",
    "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress",
    "cudaErrorInvalidAddressSpace",
    "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure",
    "cudaErrorTensorMemoryLeak",
    "cudaErrorMpsClientTerminated",
    "cudaErrorExternalDevice",
    "cudaErrorContained",
)
_STICKY = frozenset(
    int(getattr(cudart.cudaError_t, name)) for name in _STICKY_NAMES if hasattr(cudart.cudaError_t, name)
)


def is_sticky(code: int) -> bool:
    """Whether the context is lost after this error: no further CUDA call can succeed in this process."""
    return code in _STICKY


class CudaCallError(Exception):
    """A call of the runtime failed. Stays inside the house, which turns it into an `AllocationError`."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.call = call
        self.code = code
        self.text = text


class CudaRuntime(Protocol):
    """What the resources ask of CUDA. Every method raises `CudaCallError`."""

    def malloc(self, size: int) -> int:
        """cudaMalloc on the runtime's device: an address."""

    def free(self, ptr: int) -> None:
        """cudaFree. Waits for the device."""

    def host_malloc(self, size: int) -> int:
        """cudaHostAlloc: an address of page-locked host memory."""

    def host_free(self, ptr: int) -> None:
        """cudaFreeHost."""

    def pool_malloc(self, size: int, pool: Any, stream: int) -> int:
        """cudaMallocFromPoolAsync: an address."""

    def pool_free(self, ptr: int, stream: int) -> None:
        """cudaFreeAsync."""

    def pool_create(self, max_size: int) -> Any:
        """cudaMemPoolCreate on the runtime's device. `max_size` bytes, 0 for no cap."""

    def pool_destroy(self, pool: Any) -> None:
        """cudaMemPoolDestroy."""

    def pool_keep(self, pool: Any, threshold: int) -> None:
        """Bytes that the pool keeps when the device synchronises (cudaMemPoolAttrReleaseThreshold)."""

    def pool_bytes(self, pool: Any) -> tuple[int, int]:
        """(used, reserved) bytes of the pool now."""

    def pool_trim(self, pool: Any) -> None:
        """cudaMemPoolTrimTo(0): give back every chunk that holds no live block."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device (cudaMemGetInfo). Creates the context if there is none."""

    def synchronize(self) -> None:
        """cudaDeviceSynchronize: earlier asynchronous errors come out here."""

    def clear_last_error(self) -> int:
        """cudaGetLastError: the code it held. A handled failure left there is blamed on the next kernel."""


class BoundCudaRuntime:
    """`CudaRuntime` over cuda-python's bindings, for one device."""

    def __init__(self, device_id: int = 0) -> None:
        self.device_id = device_id

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *results = getattr(cudart, name)(*arguments)
        if int(code) != 0:
            _, text = cudart.cudaGetErrorString(code)
            raise CudaCallError(name, int(code), text.decode() if text else str(code))
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def _use_device(self) -> None:
        # The current device belongs to the calling thread, and frees may come from any.
        self._call("cudaSetDevice", self.device_id)

    def malloc(self, size: int) -> int:
        self._use_device()
        return int(self._call("cudaMalloc", size))

    def free(self, ptr: int) -> None:
        self._use_device()
        self._call("cudaFree", ptr)

    def host_malloc(self, size: int) -> int:
        self._use_device()
        return int(self._call("cudaHostAlloc", size, cudart.cudaHostAllocDefault))

    def host_free(self, ptr: int) -> None:
        self._call("cudaFreeHost", ptr)

    def pool_malloc(self, size: int, pool: Any, stream: int) -> int:
        self._use_device()
        return int(self._call("cudaMallocFromPoolAsync", size, pool, stream))

    def pool_free(self, ptr: int, stream: int) -> None:
        self._use_device()
        self._call("cudaFreeAsync", ptr, stream)

    def pool_create(self, max_size: int) -> Any:
        properties = cudart.cudaMemPoolProps()
        properties.allocType = cudart.cudaMemAllocationType.cudaMemAllocationTypePinned
        properties.location.type = cudart.cudaMemLocationType.cudaMemLocationTypeDevice
        properties.location.id = self.device_id
        properties.maxSize = max_size
        self._use_device()
        return self._call("cudaMemPoolCreate", properties)

    def pool_destroy(self, pool: Any) -> None:
        self._call("cudaMemPoolDestroy", pool)

    def pool_keep(self, pool: Any, threshold: int) -> None:
        attribute = cudart.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        # The attribute is a 64-bit counter; the binding's own type for it is cuuint64_t.
        from cuda.bindings import driver

        self._call("cudaMemPoolSetAttribute", pool, attribute, driver.cuuint64_t(threshold))

    def pool_bytes(self, pool: Any) -> tuple[int, int]:
        attributes = cudart.cudaMemPoolAttr
        used = self._call("cudaMemPoolGetAttribute", pool, attributes.cudaMemPoolAttrUsedMemCurrent)
        reserved = self._call("cudaMemPoolGetAttribute", pool, attributes.cudaMemPoolAttrReservedMemCurrent)
        return int(used), int(reserved)

    def pool_trim(self, pool: Any) -> None:
        self._call("cudaMemPoolTrimTo", pool, 0)

    def memory_info(self) -> tuple[int, int]:
        self._use_device()
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def synchronize(self) -> None:
        self._use_device()
        self._call("cudaDeviceSynchronize")

    def clear_last_error(self) -> int:
        return int(cudart.cudaGetLastError()[0])
