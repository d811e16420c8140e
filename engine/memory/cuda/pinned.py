"""Page-locked host memory: what copies to and from the device go through."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from engine.memory.base import PointerResource, forget_block
from engine.memory.cuda.device import DeviceHealth
from engine.memory.cuda.runtime import OUT_OF_MEMORY, CudaCallError, CudaRuntime
from engine.memory.errors import AllocationError, OutOfMemoryError, StickyDeviceError, Why
from engine.memory.failures import failed_request

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = ["PinnedMemoryResource"]


class PinnedMemoryResource(PointerResource):
    """Host memory by cudaHostAlloc. After a lost context it is left to the process's end: CUDA is not asked.

    Fails with `OutOfMemoryError` (``full``: the host will lock no more pages), or `StickyDeviceError`.
    """

    api = "pinned"
    is_device_accessible = True
    is_host_accessible = True
    device_id = -1

    def __init__(self, runtime: CudaRuntime, health: DeviceHealth) -> None:
        self._runtime = runtime
        self._health = health
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}

    @property
    def live(self) -> int:
        """Bytes that callers hold."""
        return sum(self._sizes.values())

    def acquire(self, size: int, stream: Stream | None) -> int:
        lost = self._health.lost
        if lost is not None:
            raise self._failure(size, lost)
        try:
            ptr = self._runtime.host_malloc(max(size, 1))
        except CudaCallError as error:
            raise self._failure(size, error) from error
        with self._lock:
            self._sizes[ptr] = size
        return ptr

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        with self._lock:
            forget_block(self._sizes, ptr, size)
        if self._health.lost is not None:
            return
        try:
            self._runtime.host_free(ptr)
        except CudaCallError as error:
            self._health.note(error)

    def _failure(self, size: int, error: CudaCallError) -> AllocationError:
        self._health.note(error)
        is_full = error.code == OUT_OF_MEMORY
        request = failed_request(
            size,
            api=self.api,
            why=Why.FULL if is_full else Why.EARLIER_ERROR,
            error=error.text,
            error_code=error.code,
            live=self.live,
        )
        if self._health.lost is not None:
            return StickyDeviceError(request)
        self._runtime.clear_last_error()
        return OutOfMemoryError(request) if is_full else AllocationError(request)
