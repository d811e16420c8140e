"""What resources and adaptors of the house share: pointers below, buffers on top, and a gauge of the device.

cuda.core's `MemoryResource` hands out `Buffer` objects that own their bytes. Stacked adaptors must not each
own them: a buffer is freed once, through the adaptor it came from, and every layer below sees that free
once. So a resource of the house is split in two. `acquire` and `release` pass plain pointers and are what
adaptors stack; `allocate` and `deallocate` are cuda.core's interface, and only the resource that was
*asked* makes the `Buffer`. A failed `release` raises to the layers above it, which then count nothing; only
`deallocate`, which destructors call, turns it into a warning.
"""

from __future__ import annotations

import operator
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cuda.core import Buffer, MemoryResource

from engine.memory.errors import OutOfMemoryError, UnknownPointerError
from engine.memory.failures import failed_request

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = [
    "BypassListener",
    "BypassReporter",
    "DeviceGauge",
    "ForeignMemoryResource",
    "MemoryDeallocationWarning",
    "Overheads",
    "PointerResource",
    "forget_block",
]


class MemoryDeallocationWarning(RuntimeWarning):
    """A free went wrong where nothing can be raised: in a destructor, or on a pointer that is not ours."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Bytes of the device that no tag owns, as far as the device's own resource can tell. Signed."""

    pool_slack: int = 0
    """reserved by the pool and not used"""
    rounding: int = 0
    """what the driver's granularity adds to the sizes asked for"""
    context: int = 0
    library: int = 0
    """modules and libraries' own allocations"""
    other_processes: int = 0
    bypass: int = 0
    """this process's, past the allocator: known only where the device is observed"""

    @property
    def total(self) -> int:
        ours = self.pool_slack + self.rounding + self.context + self.library + self.bypass
        return ours + self.other_processes


@runtime_checkable
class DeviceGauge(Protocol):
    """What the house reads off the device beside allocating on it."""

    device: str
    """``host`` or ``cuda``: what lines begin with"""
    api: str
    """the call a request goes through: ``host``, ``malloc``, ``async``, ``plan``"""
    exact: bool
    """`read_free` is exact, races with nobody and costs nothing: never estimate"""

    @property
    def total(self) -> int:
        """Bytes of the device."""

    def read_free(self) -> int:
        """Free bytes now. May cost milliseconds, and may raise the device's error."""

    def read_pool(self) -> tuple[int, int] | None:
        """(used, reserved) bytes of the stream-ordered pool; None where there is no pool."""

    def overheads(self) -> Overheads:
        """The part of the ledger that no tag owns."""

    def last_retries(self) -> int:
        """How often the calling thread's last request was asked again before it got its outcome."""


class BypassListener(Protocol):
    """Is told of device memory that went past every resource."""

    def __call__(self, size: int, text: str, *, expected: bool) -> None:
        """`size` bytes, described by `text`. `expected`: loading kernels brings such, by the hundred."""


@runtime_checkable
class BypassReporter(Protocol):
    """A gauge that may learn of device memory which went past every resource."""

    def report_bypasses(self, listener: BypassListener) -> None:
        """Have `listener` called for each, once."""


class PointerResource(MemoryResource):
    """A memory resource of the house. Subclasses give `acquire`, `release` and the device's properties."""

    @abstractmethod
    def acquire(self, size: int, stream: Stream | None) -> int:
        """Address of `size` fresh bytes. Raises `AllocationError`."""

    @abstractmethod
    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        """Give back what `acquire` returned. Raises `UnknownPointerError`, having changed nothing."""

    # cuda.core wants a stream on every call; a host resource has none to give, so it may be left out here.
    def allocate(self, size: int, *, stream: Any = None) -> Buffer:
        """`size` bytes as a buffer that gives them back when it is closed or collected.

        Raises
        ------
        OutOfMemoryError, StickyDeviceError
            The request failed.
        ValueError, TypeError
            `size` is negative or no integer. Nothing was asked for, so nothing is recorded or counted.
        """
        size = operator.index(size)
        if size < 0:
            raise ValueError(f"cannot allocate {size} bytes: the size must be 0 or more")
        ptr = self.acquire(size, stream)
        try:
            return Buffer.from_handle(ptr, size, mr=self, stream=stream)
        except BaseException:
            self.release(ptr, size, stream)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
        """Give `ptr` back. Called by destructors, perhaps from the garbage collector: only warns."""
        try:
            self.release(int(ptr), size, stream)
        except Exception as error:
            warnings.warn(str(error), MemoryDeallocationWarning, stacklevel=2)


class ForeignMemoryResource(PointerResource):
    """Any other `MemoryResource` (cuda.core's own, a library's) under adaptors of the house.

    It keeps the foreign buffers, which own their bytes, until their pointers are released.
    """

    def __init__(self, upstream: MemoryResource) -> None:
        self.upstream = upstream
        self._buffers: dict[int, Buffer] = {}

    def acquire(self, size: int, stream: Stream | None) -> int:
        try:
            buffer = self.upstream.allocate(size, stream=stream)
        except MemoryError as error:
            request = failed_request(size, error=str(error) or "out of memory")
            raise OutOfMemoryError(request) from error
        ptr = int(buffer.handle)
        self._buffers[ptr] = buffer
        return ptr

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        buffer = self._buffers.pop(ptr, None)
        if buffer is None:
            raise UnknownPointerError(ptr, size)
        # A buffer on the host has no stream: cuda.core would ask a driver for the one that it is handed here.
        buffer.close(stream if self.is_device_accessible else None)

    @property
    def is_device_accessible(self) -> bool:
        return bool(self.upstream.is_device_accessible)

    @property
    def is_host_accessible(self) -> bool:
        return bool(self.upstream.is_host_accessible)

    @property
    def device_id(self) -> int:
        return int(self.upstream.device_id)


def forget_block(sizes: dict[int, int], ptr: int, size: int) -> None:
    """Take the block at `ptr` out of `sizes`. Raises UnknownPointerError if none of `size` bytes is there."""
    known = sizes.get(ptr)
    if known != size:
        raise UnknownPointerError(ptr, size, known)
    del sizes[ptr]
