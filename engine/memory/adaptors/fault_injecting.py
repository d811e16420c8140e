"""Failures on order, so that what should survive them can be tested."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING

from cuda.core import MemoryResource

from engine.memory.adaptors.adaptor import MemoryAdaptor, gauge_of
from engine.memory.errors import AllocationError, OutOfMemoryError, Why
from engine.memory.failures import failed_request
from engine.memory.scope import current_tag

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = ["Fault", "FaultInjectingMemoryResource"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Which requests fail. The conditions hold together; with none, every request fails."""

    larger_than: int | None = None
    """requests of more bytes than this"""
    tag: str | None = None
    """requests whose tag is this or begins with this and a slash: ``kv``, ``weights/lm_head``"""
    nth: int | None = None
    """only the n-th (from 1) of the requests that the other conditions match"""
    times: int | None = None
    """stop after this many failures"""
    error: type[AllocationError] = OutOfMemoryError
    why: Why = Why.INJECTED

    def matches(self, size: int, tag: str) -> bool:
        """Whether size and tag match; `nth` and `times` are the adaptor's to count."""
        if self.larger_than is not None and size <= self.larger_than:
            return False
        return self.tag is None or tag == self.tag or tag.startswith(self.tag + "/")


class FaultInjectingMemoryResource(MemoryAdaptor):
    """Fails the requests that a `Fault` describes, before the upstream sees them: ``why=injected``."""

    def __init__(self, upstream: MemoryResource, faults: Iterable[Fault] = ()) -> None:
        super().__init__(upstream)
        self._lock = RLock()
        self._faults: list[_Armed] = []
        gauge = gauge_of(upstream)
        self._api = gauge.api if gauge is not None else "host"
        self.injected = 0
        """Failures so far."""
        for fault in faults:
            self.arm(fault)

    def arm(self, fault: Fault) -> None:
        """Add a fault; its `nth` counts from now."""
        with self._lock:
            self._faults.append(_Armed(fault))

    def disarm(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def acquire(self, size: int, stream: Stream | None) -> int:
        tag = current_tag()
        with self._lock:
            # Every fault counts every request, also one that another fault takes.
            due = [armed.fault for armed in self._faults if armed.is_due(size, tag)]
            self.injected += bool(due)
        if due:
            fault = due[0]
            raise fault.error(failed_request(size, api=self._api, why=fault.why, error="injected failure"))
        return self._upstream.acquire(size, stream)

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        self._upstream.release(ptr, size, stream)


class _Armed:
    """A fault and how far it is."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.matched = 0
        self.failed = 0

    def is_due(self, size: int, tag: str) -> bool:
        if not self.fault.matches(size, tag):
            return False
        self.matched += 1
        if self.fault.nth is not None and self.matched != self.fault.nth:
            return False
        if self.fault.times is not None and self.failed >= self.fault.times:
            return False
        self.failed += 1
        return True
