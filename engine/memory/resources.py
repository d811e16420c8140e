"""Resources: they hand out memory. Watching, counting, capping and breaking is the adaptors' business."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from abc import abstractmethod
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from engine.memory.base import Overheads, PointerResource, forget_block
from engine.memory.errors import OutOfMemoryError, Why
from engine.memory.failures import failed_request
from engine.memory.scope import current_tag

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = ["HostMemoryResource", "PlanningMemoryResource", "host_capacity"]


class _CapacityMemoryResource(PointerResource):
    """Exact, thread-safe accounting of live bytes against a capacity, and the gauge that reads it."""

    device = "host"
    api: str
    exact = True

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a device cannot have a capacity of {capacity} bytes")
        # Reentrant: a destructor run by the garbage collector may free while this thread allocates.
        self._lock = RLock()
        self._capacity = capacity
        self._live = 0
        self._charged = 0
        self._sizes: dict[int, int] = {}

    @abstractmethod
    def _cost(self, size: int) -> int:
        """What a request of `size` bytes takes from the capacity."""

    @abstractmethod
    def _map(self, size: int) -> int:
        """Address of `size` bytes. Raises OSError with a number if the system refuses."""

    @abstractmethod
    def _unmap(self, ptr: int, size: int) -> None:
        """Undo `_map`."""

    def acquire(self, size: int, stream: Stream | None) -> int:
        cost = self._cost(size)
        with self._lock:
            fits = self._charged + cost <= self._capacity
            if fits:
                self._charged += cost
                self._live += size
        if not fits:
            raise self._failure(size, Why.FULL, "out of memory")
        try:
            ptr = self._map(size)
        except BaseException as error:
            self._refund(cost, size)
            if not isinstance(error, OSError) or error.errno is None:
                raise
            reason = os.strerror(error.errno).lower()
            raise self._failure(size, Why.ADDRESS_SPACE, reason, error.errno) from None
        self._sizes[ptr] = size
        return ptr

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        with self._lock:
            forget_block(self._sizes, ptr, size)
        self._unmap(ptr, size)
        self._refund(self._cost(size), size)

    def _refund(self, cost: int, size: int) -> None:
        with self._lock:
            self._charged -= cost
            self._live -= size

    def _failure(self, size: int, why: Why, error: str, code: int = 0) -> OutOfMemoryError:
        free, live = self.read_free(), self._live
        request = failed_request(
            size, api=self.api, why=why, error=error, error_code=code, free=free, live=live
        )
        return OutOfMemoryError(request)

    # -- gauge ---------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """The capacity in bytes."""
        return self._capacity

    @property
    def live(self) -> int:
        """Bytes that callers hold, as they asked for them."""
        return self._live

    def read_free(self) -> int:
        """Capacity that is left, in bytes. Exact."""
        return self._capacity - self._charged

    def read_pool(self) -> tuple[int, int] | None:
        return None

    def overheads(self) -> Overheads:
        return Overheads(rounding=self._charged - self._live)

    def last_retries(self) -> int:
        return 0


# -- the host ----------------------------------------------------------------------------------------------

_ALIGNMENT = 64
_MAPPED_FROM = 256 << 10
"""Requests from this size get a mapping of their own, which goes back to the system when it is freed."""
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_NOHUGEPAGE = getattr(mmap, "MADV_NOHUGEPAGE", None)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.free.restype = None
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostMemoryResource(_CapacityMemoryResource):
    """The host's memory as a device of `capacity` bytes: the CPU device.

    Addresses are aligned to 64 bytes, those of large blocks to a page or a huge page. Large blocks are
    anonymous mappings: pages cost nothing until they are written, so a generous KV cache costs what its
    tokens use. Every byte asked for counts against the capacity, no more (``rounding`` is 0); a request of
    0 bytes gets an address of its own and costs nothing.

    As everywhere in cuda.core, *closing* a buffer gives its bytes back at once, under any NumPy view of it; a
    buffer that is *dropped* keeps them until its last view is gone.

    Fails with `OutOfMemoryError`: ``why=full`` when the capacity is used up, ``why=address-space`` when the
    capacity has room and the system refuses.
    """

    api = "host"
    is_device_accessible = False
    is_host_accessible = True
    device_id = -1

    def _cost(self, size: int) -> int:
        return size

    def _map(self, size: int) -> int:
        if size >= _MAPPED_FROM:
            return self._map_pages(size)
        address = ctypes.c_void_p()
        code = _libc.posix_memalign(ctypes.byref(address), _ALIGNMENT, size or 1)
        if code or address.value is None:
            raise OSError(code, os.strerror(code))
        return address.value

    def _unmap(self, ptr: int, size: int) -> None:
        if size >= _MAPPED_FROM:
            _libc.munmap(ptr, _whole_pages(size))
        else:
            _libc.free(ptr)

    def _map_pages(self, size: int) -> int:
        length = _whole_pages(size)
        # The kernel uses huge pages only where they fit, so ask for more and cut to the boundary.
        slack = _HUGE_PAGE if length >= 2 * _HUGE_PAGE else 0
        mapped = _libc.mmap(
            None, length + slack, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0
        )
        if mapped is None or mapped == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        address: int = mapped
        if slack:
            address = -(-mapped // _HUGE_PAGE) * _HUGE_PAGE
            before, after = address - mapped, slack - (address - mapped)
            if before:
                _libc.munmap(mapped, before)
            if after:
                _libc.munmap(address + length, after)
            # Weights are written whole and read by every step. A KV cache is touched here and there: with
            # huge pages its first token would make 2 MiB resident in every layer.
            segment = current_tag().partition("/")[0]
            if segment == "weights" and _MADV_HUGEPAGE is not None:
                _libc.madvise(address, length, _MADV_HUGEPAGE)
            elif segment == "kv" and _MADV_NOHUGEPAGE is not None:
                _libc.madvise(address, length, _MADV_NOHUGEPAGE)
        return address


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def host_capacity() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit if that is lower."""
    capacity = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups v2, v1
        try:
            text = (Path("/sys/fs/cgroup") / limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            capacity = min(capacity, int(text))
    return capacity


# -- no memory at all --------------------------------------------------------------------------------------

_SHARED_STEP = 512
"""what small requests that share a step are rounded up to"""


class PlanningMemoryResource(_CapacityMemoryResource):
    """Addresses without memory: what a load would ask of a device of `capacity` bytes, in milliseconds.

    Each request takes whole steps of `granularity` bytes from the capacity. Addresses never overlap and are
    never given out again, and nothing is behind them: the buffers are accessible from nowhere.

    Parameters
    ----------
    capacity
        Bytes of the device.
    granularity
        Bytes that requests are rounded up to.
    shared_below
        Requests of less than this share steps: they are rounded up to 512 bytes only.
    taken
        Bytes of the capacity that are gone before the first request: a context, other processes.
    device
        What lines begin with.
    mappable
        Most that may be live before requests fail with ``why=address-space``; None: all of the capacity.
    """

    api = "plan"
    is_device_accessible = False
    is_host_accessible = False
    device_id = -1

    def __init__(
        self,
        capacity: int,
        granularity: int = 1,
        *,
        shared_below: int = 0,
        taken: int = 0,
        device: str = "host",
        mappable: int | None = None,
    ) -> None:
        if granularity < 1:
            raise ValueError(f"a granularity of {granularity} bytes is not 1 or more")
        if not 0 <= taken <= capacity:
            raise ValueError(f"{taken} bytes cannot be taken of a capacity of {capacity}")
        super().__init__(capacity)
        self.granularity = granularity
        self.device = device
        self._shared_below = shared_below
        self._taken = self._charged = taken
        self._mappable = mappable
        self._step = -(-_ALIGNMENT // granularity) * granularity
        self._next = 1 << 44  # far from any address a process really has

    def _cost(self, size: int) -> int:
        step = min(_SHARED_STEP, self.granularity) if size < self._shared_below else self.granularity
        return -(-size // step) * step

    def overheads(self) -> Overheads:
        return Overheads(rounding=self._charged - self._taken - self._live, context=self._taken)

    def _map(self, size: int) -> int:
        with self._lock:
            if self._mappable is not None and self._live > self._mappable:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            ptr = self._next
            self._next += max(-(-size // self._step) * self._step, self._step)
        return ptr

    def _unmap(self, ptr: int, size: int) -> None:
        """Nothing was mapped."""
