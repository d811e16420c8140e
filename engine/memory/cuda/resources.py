"""The two ways to ask CUDA for memory: cudaMalloc, and a stream-ordered pool of our own."""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from engine.memory.adaptors import gauge_of
from engine.memory.base import BypassListener, Overheads, PointerResource, forget_block
from engine.memory.cuda.device import CudaDeviceAccount
from engine.memory.cuda.runtime import OUT_OF_MEMORY, CudaCallError, CudaRuntime, is_sticky
from engine.memory.errors import (
    AllocationError,
    OutOfMemoryError,
    StickyDeviceError,
    Why,
)
from engine.memory.failures import failed_request

if TYPE_CHECKING:
    from cuda.core import MemoryResource, Stream

__all__ = ["CudaMallocMemoryResource", "CudaPoolMemoryResource", "account_of"]

DRIVER_STEP = 2 << 20
"""cudaMalloc takes memory from the device in steps of 2 MiB; smaller requests share a step."""


class _CudaMemoryResource(PointerResource):
    """Live blocks, failures and the gauge, common to both ways of asking."""

    device = "cuda"
    api: str
    exact = False
    is_device_accessible = True
    is_host_accessible = False

    def __init__(self, account: CudaDeviceAccount, runtime: CudaRuntime, device_id: int = 0) -> None:
        self._account = account
        self._runtime = runtime
        self._device_id = device_id
        # Reentrant: a destructor run by the garbage collector may free while this thread allocates.
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._health = account.health
        self._retries = threading.local()

    @property
    def account(self) -> CudaDeviceAccount:
        """The device's, which all resources on it share."""
        return self._account

    @property
    def device_id(self) -> int:
        return self._device_id

    @property
    def live(self) -> int:
        """Bytes that callers hold, as they asked for them."""
        return self._live

    # -- requests ------------------------------------------------------------------------------------------

    @abstractmethod
    def _ask(self, size: int, stream: int) -> int:
        """One call of the runtime. Raises `CudaCallError`."""

    @abstractmethod
    def _give_back(self, ptr: int, stream: int) -> None:
        """Undo `_ask`. Raises `CudaCallError`."""

    @abstractmethod
    def _again(self, size: int, stream: int) -> int:
        """After an out-of-memory: make room if that is possible, ask once more. Raises `CudaCallError`."""

    @abstractmethod
    def _cause(self, size: int, free: int) -> Why:
        """Why a request failed with `free` bytes left on the device."""

    @abstractmethod
    def _account_for(self, ptr: int, size: int, sign: int) -> None:
        """Book what a block takes of the device (`sign` 1), or no longer takes (-1)."""

    def acquire(self, size: int, stream: Stream | None) -> int:
        self._retries.count = 0
        self._refuse_if_lost(size)
        # CUDA answers a null pointer to a request of nothing; blocks are told apart by address.
        size_asked = max(size, 1)
        handle = _stream_handle(stream)
        try:
            ptr = self._ask(size_asked, handle)
        except CudaCallError as error:
            ptr = self._retry(size, size_asked, handle, error)
        with self._lock:
            self._sizes[ptr] = size
            self._live += size
            self._account_for(ptr, size_asked, 1)
        return ptr

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        with self._lock:
            forget_block(self._sizes, ptr, size)
            self._live -= size
            self._account_for(ptr, max(size, 1), -1)
        if self._health.lost is not None:
            return  # the context took the block with it
        try:
            self._give_back(ptr, _stream_handle(stream))
        except CudaCallError as error:
            self._health.note(error)

    def close(self) -> None:
        """Watch no more what goes past this resource. Blocks can still be given back."""
        if self._account.book is not None:
            self._account.book.close()

    def report_bypasses(self, listener: BypassListener) -> None:
        book = self._account.book
        if book is not None:
            book.listener = lambda bypass: listener(
                bypass.size, bypass.describe(), expected=bypass.in_library_step
            )

    # -- failures ------------------------------------------------------------------------------------------

    def _retry(self, size: int, size_asked: int, handle: int, error: CudaCallError) -> int:
        if error.code == OUT_OF_MEMORY:
            self._runtime.clear_last_error()
            try:
                return self._again(size_asked, handle)
            except CudaCallError as second:
                error = second
        raise self._failure(size, error) from error

    def _failure(self, size: int, error: CudaCallError) -> AllocationError:
        """Classify by code: a call that allocates may report an earlier kernel's error."""
        self._health.note(error)
        self._account.settle()  # what went past us may be why: it is told before the failure
        facts: dict[str, Any] = {
            "api": self.api,
            "error": error.text,
            "error_code": error.code,
            "live": self._live,
        }
        if self._health.lost is not None:
            return StickyDeviceError(failed_request(size, why=Why.EARLIER_ERROR, **facts))
        self._runtime.clear_last_error()
        if error.code != OUT_OF_MEMORY:
            return AllocationError(failed_request(size, why=Why.EARLIER_ERROR, **facts))
        try:
            free = self.read_free()
        except CudaCallError as unreadable:
            return self._failure(size, unreadable)
        return OutOfMemoryError(failed_request(size, why=self._cause(size, free), free=free, **facts))

    def _short_of_memory(self, size: int, free: int) -> Why:
        """The device has too little: the neighbours' doing, if the request would fit without them."""
        others = self._account.other_processes()
        return Why.NEIGHBOUR if others > 0 and size <= free + others else Why.FULL

    def _refuse_if_lost(self, size: int) -> None:
        lost = self._health.lost
        if lost is not None:
            raise StickyDeviceError(
                failed_request(
                    size,
                    api=self.api,
                    why=Why.EARLIER_ERROR,
                    error=f"the context is lost ({lost.text}); nothing was asked of CUDA",
                    error_code=lost.code,
                    live=self._live,
                )
            )

    # -- gauge ---------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Bytes of the device, as cudaMemGetInfo tells them."""
        return self._account.total

    def read_free(self) -> int:
        """The driver's free bytes. Raises `CudaCallError`; after a lost context that error, unasked."""
        if self._health.lost is not None:
            raise self._health.lost
        return self._account.free()

    def read_pool(self) -> tuple[int, int] | None:
        return None

    def overheads(self) -> Overheads:
        return Overheads(
            rounding=self._rounding(),
            pool_slack=self._slack(),
            context=self._account.context,
            library=self._account.library,
            other_processes=self._account.other_processes(),
            bypass=self._account.bypassed(),
        )

    @abstractmethod
    def _rounding(self) -> int: ...

    def _slack(self) -> int:
        return 0

    def last_retries(self) -> int:
        return getattr(self._retries, "count", 0)


class CudaMallocMemoryResource(_CudaMemoryResource):
    """Every request is a cudaMalloc, every free a cudaFree.

    The device gives memory in steps of 2 MiB that small blocks share; which steps are touched follows from
    the addresses, so the rounding is exact as long as the driver gives back empty steps.

    Fails with `OutOfMemoryError`: ``full``, ``neighbour``, or ``address-space`` when the device has the bytes
    and still refuses. `StickyDeviceError` after an earlier asynchronous error.
    """

    api = "malloc"
    granularity = DRIVER_STEP
    """bytes; a large request takes whole steps of it"""

    def __init__(self, account: CudaDeviceAccount, runtime: CudaRuntime, device_id: int = 0) -> None:
        super().__init__(account, runtime, device_id)
        self._shared_steps: dict[int, int] = {}
        self._steps = 0

    def _ask(self, size: int, stream: int) -> int:
        return self._runtime.malloc(size)

    def _give_back(self, ptr: int, stream: int) -> None:
        self._runtime.free(ptr)

    def _again(self, size: int, stream: int) -> int:
        # Blocks freed in stream order elsewhere in the process come back once the device has caught up.
        self._runtime.synchronize()
        self._retries.count = 1
        return self._runtime.malloc(size)

    def _cause(self, size: int, free: int) -> Why:
        return Why.ADDRESS_SPACE if size <= free else self._short_of_memory(size, free)

    def _account_for(self, ptr: int, size: int, sign: int) -> None:
        first, last = ptr // DRIVER_STEP, (ptr + size - 1) // DRIVER_STEP
        before = self._steps
        self._steps += sign * max(last - first - 1, 0)  # steps in the middle are this block's alone
        for step in {first, last}:
            users = self._shared_steps.pop(step, 0) + sign
            if users:
                self._shared_steps[step] = users
            if (sign, users) in {(1, 1), (-1, 0)}:
                self._steps += sign
        self._account.taken += (self._steps - before) * DRIVER_STEP

    def _rounding(self) -> int:
        return self._steps * DRIVER_STEP - self._live


class CudaPoolMemoryResource(_CudaMemoryResource):
    """Requests from a stream-ordered pool of our own (cudaMallocFromPoolAsync), capped at `max_size` bytes.

    A request that fails first grows the pool over all free memory, which the pool then keeps: nobody else in
    the process finds a byte. So after a failure the device is synchronised (frees are observed), the pool
    trimmed, and the request made once more; `last_retries` says so.

    Parameters
    ----------
    keep
        Bytes that the pool keeps over a synchronisation (its release threshold). By default all: a step
        must not pay for growing the pool again.
    """

    api = "async"

    def __init__(
        self,
        account: CudaDeviceAccount,
        runtime: CudaRuntime,
        device_id: int = 0,
        *,
        max_size: int = 0,
        keep: int = (1 << 64) - 1,
    ) -> None:
        super().__init__(account, runtime, device_id)
        self._max_size = max_size
        self._pool = runtime.pool_create(max_size)
        self._bytes = (0, 0)
        runtime.pool_keep(self._pool, keep)

    def close(self) -> None:
        """Destroy the pool. Its blocks must have been given back."""
        pool, self._pool = self._pool, None
        if pool is not None and self._health.lost is None:
            self._runtime.synchronize()
            self._runtime.pool_destroy(pool)
            self._account.taken -= self._bytes[1]
        super().close()

    def _ask(self, size: int, stream: int) -> int:
        return self._runtime.pool_malloc(size, self._pool, stream)

    def _give_back(self, ptr: int, stream: int) -> None:
        self._runtime.pool_free(ptr, stream)

    def _again(self, size: int, stream: int) -> int:
        if self._over_cap(size):
            raise CudaCallError("cudaMallocFromPoolAsync", OUT_OF_MEMORY, "out of memory (the pool's cap)")
        self._runtime.synchronize()
        self._runtime.pool_trim(self._pool)
        self._retries.count = 1
        try:
            return self._ask(size, stream)
        except CudaCallError as error:
            if not is_sticky(error.code):
                self._runtime.clear_last_error()
                self._runtime.pool_trim(self._pool)  # the second failure grew the pool again
            raise

    def _over_cap(self, size: int) -> bool:
        return self._max_size > 0 and self.read_pool()[0] + size > self._max_size

    def _cause(self, size: int, free: int) -> Why:
        if self._over_cap(size):
            return Why.CAP
        if size <= free + self._slack():
            return Why.FRAGMENTATION
        return self._short_of_memory(size, free)

    def _account_for(self, ptr: int, size: int, sign: int) -> None:
        before = self._bytes[1]
        # An earlier kernel's error may come out here. The block is there; the next request fails.
        with suppress(CudaCallError):
            self._account.taken += self.read_pool()[1] - before

    def read_pool(self) -> tuple[int, int]:
        """(used, reserved) bytes; as last read once the context is lost. Raises `CudaCallError`."""
        if self._health.lost is None and self._pool is not None:
            try:
                self._bytes = self._runtime.pool_bytes(self._pool)
            except CudaCallError as error:
                self._health.note(error)
                raise
        return self._bytes

    def _slack(self) -> int:
        used, reserved = self.read_pool()
        return reserved - used

    def _rounding(self) -> int:
        return self.read_pool()[0] - self._live


def account_of(memory: MemoryResource) -> CudaDeviceAccount | None:
    """The account of the device at the bottom of a stack of adaptors; None if no CUDA resource is there."""
    gauge = gauge_of(memory)
    return gauge.account if isinstance(gauge, _CudaMemoryResource) else None


def _stream_handle(stream: Any) -> int:
    """The runtime's handle of a stream; None is the legacy default stream."""
    return 0 if stream is None else int(stream.handle)
