"""A cap below what the device has."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING

from cuda.core import MemoryResource

from engine.memory.adaptors.adaptor import MemoryAdaptor, gauge_of
from engine.memory.errors import OutOfMemoryError, Why, describe_bytes
from engine.memory.failures import failed_request

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = ["LimitingMemoryResource", "cap_of"]


class LimitingMemoryResource(MemoryAdaptor):
    """Refuses what would make more than `limit` bytes live through it: `OutOfMemoryError`, ``why=cap``."""

    def __init__(self, upstream: MemoryResource, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"a limit of {limit} bytes is not 0 or more")
        super().__init__(upstream)
        self.limit = limit
        self._lock = RLock()
        self._live = 0
        gauge = gauge_of(upstream)
        self._api = gauge.api if gauge is not None else "host"

    @property
    def live(self) -> int:
        """Bytes live through this adaptor."""
        return self._live

    @property
    def available(self) -> int:
        """Bytes left under the limit. The device may have fewer."""
        return self.limit - self._live

    def acquire(self, size: int, stream: Stream | None) -> int:
        # Taken before the upstream is asked, so that threads cannot pass the limit together.
        with self._lock:
            live = self._live
            fits = live + size <= self.limit
            if fits:
                self._live = live + size
        if not fits:
            limit = describe_bytes(self.limit)
            raise OutOfMemoryError(
                failed_request(
                    size,
                    api=self._api,
                    why=Why.CAP,
                    error=f"out of memory: over the limit of {limit}",
                    live=live,
                )
            )
        try:
            return self._upstream.acquire(size, stream)
        except BaseException:
            with self._lock:
                self._live -= size
            raise

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        self._upstream.release(ptr, size, stream)
        with self._lock:
            self._live -= size


def cap_of(resource: MemoryResource) -> int | None:
    """The lowest limit in a stack of adaptors; None if there is none."""
    lowest = None
    while isinstance(resource, MemoryAdaptor):
        if isinstance(resource, LimitingMemoryResource):
            lowest = resource.limit if lowest is None else min(lowest, resource.limit)
        resource = resource.upstream
    return lowest
