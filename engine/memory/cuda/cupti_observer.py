"""CUPTI as the observer of a `BypassBook`: NVIDIA's profiling interface sees every allocation of the process.

Allocations and releases come as activity records (kind MEMORY2), some time later and in CUPTI's own thread,
those of libraries and of modules' variables among them. Activity records know nothing of requests that
failed, so calls that allocate are subscribed to as well. CUPTI User Guide, "CUPTI Activity API" and "CUPTI
Callback API".
"""

from __future__ import annotations

import ctypes
import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.memory.cuda.bypass import BypassBook, ObservedAllocation, ObservedFailure
from engine.memory.errors import ConfigurationError

__all__ = ["CuptiObserver"]

_log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
_KINDS = {
    "DEVICE": "device",
    "DEVICE_STATIC": "device_static",
    "ARRAY": "array",
    "MANAGED": "managed",
    "MANAGED_STATIC": "managed_static",
}
"""CUPTI's kinds of memory that are the device's; the others are the host's"""
_RUNTIME_CALLS = (
    "cudaMalloc_v3020",
    "cudaMallocPitch_v3020",
    "cudaMallocManaged_v6000",
    "cudaMallocAsync_v11020",
    "cudaMallocAsync_ptsz_v11020",
    "cudaMallocFromPoolAsync_v11020",
    "cudaMallocFromPoolAsync_ptsz_v11020",
)
_DRIVER_CALLS = (
    "cuMemAlloc_v2",
    "cuMemAllocManaged",
    "cuMemAllocAsync",
    "cuMemAllocAsync_ptsz",
    "cuMemAllocFromPoolAsync",
    "cuMemAllocFromPoolAsync_ptsz",
)
_SIZE_OFFSET = 8
"""bytes before the size in each call's parameters: there is a pointer before it. cudaMallocPitch has two."""


class CuptiObserver:
    """Reports what CUPTI sees to `book`. An `Observer`.

    There can be one in a process. To be made before CUDA is used, so that nothing is missed.

    Raises
    ------
    ConfigurationError
        cupti-python or CUPTI is not installed, or does not let itself be used: another profiler runs, say.
    """

    def __init__(self, book: BypassBook) -> None:
        try:
            from cupti import cupti
        except (ImportError, RuntimeError) as error:
            raise ConfigurationError(
                "VT_CUDA_ALLOC_OBSERVE: cupti-python and CUPTI are needed; pip install 'vtserve[observe]' "
                f"({error})"
            ) from error
        self._cupti: Any = cupti
        self._book = book
        self._subscriber: int | None = None
        self._is_open = True
        self._thread = threading.local()
        self._kinds = {int(getattr(cupti.ActivityMemoryKind, name)): kind for name, kind in _KINDS.items()}
        self._calls = {
            (int(domain), int(getattr(cbids, name))): name.partition("_")[0]
            for domain, cbids, names in (
                (cupti.CallbackDomain.RUNTIME_API, cupti.RuntimeApiTraceCbid, _RUNTIME_CALLS),
                (cupti.CallbackDomain.DRIVER_API, cupti.DriverApiTraceCbid, _DRIVER_CALLS),
            )
            for name in names
            if hasattr(cbids, name)
        }
        try:
            cupti.activity_register_callbacks(self._buffer_wanted, self._buffer_completed)
            cupti.activity_enable(cupti.ActivityKind.MEMORY2)
        except Exception as error:
            raise ConfigurationError(f"VT_CUDA_ALLOC_OBSERVE: CUPTI cannot be used: {error}") from error
        self._name_libraries()
        self._watch_failures()

    def flush(self) -> None:
        if not self._is_open:
            return
        try:
            self._cupti.activity_flush_all(1)
        except Exception as error:  # a failure of the watcher must not become one of what is watched
            _log.warning("CUPTI tells no more of what goes past the allocator: %s", error)
            self._is_open = False

    def close(self) -> None:
        self.flush()
        self._is_open = False
        subscriber, self._subscriber = self._subscriber, None
        with suppress(Exception):  # CUPTI ends with the process in any case
            self._cupti.activity_disable(self._cupti.ActivityKind.MEMORY2)
        with suppress(Exception):
            if subscriber is not None:
                self._cupti.unsubscribe(subscriber)

    def _name_libraries(self) -> None:
        try:
            self._cupti.activity_enable_allocation_source(1)
        except Exception as error:  # an older CUPTI: what bypasses has no name, but is found
            _log.info("CUPTI does not tell which library allocates: %s", error)

    def _watch_failures(self) -> None:
        cupti = self._cupti
        try:
            self._subscriber = cupti.subscribe(self._called, None)
            for domain, cbid in self._calls:
                cupti.enable_callback(1, self._subscriber, domain, cbid)
        except Exception as error:
            _log.warning("requests that fail behind the allocator are not seen: %s", error)

    # -- called by CUPTI: nothing may be raised, and CUDA not asked ------------------------------------------

    def _buffer_wanted(self) -> tuple[int, int]:
        """Bytes of a buffer, and the most records in it (0: as many as fit)."""
        return _BUFFER_BYTES, 0

    def _buffer_completed(self, records: list[Any]) -> None:
        try:
            for record in sorted(records, key=lambda record: int(getattr(record, "timestamp", 0))):
                if record.kind == self._cupti.ActivityKind.MEMORY2:
                    self._take(record)
        except Exception:
            _log.exception("CUPTI's records cannot be read")

    def _take(self, record: Any) -> None:
        kind = self._kinds.get(int(record.memory_kind))
        if kind is None:
            return
        if record.address == 0 and kind == "device":
            kind = "graph_reserve"  # a graph's allocations have no block of their own before it runs
        operation = self._cupti.ActivityMemoryOperationType
        pool = reserved = 0
        if record.is_async:
            config = record.memory_pool_config
            pool = int(config.address) or 1
            if int(config.memory_pool_type) == int(self._cupti.ActivityMemoryPoolType.LOCAL):
                reserved = int(config.pool.size_)
        self._book.observe(
            ObservedAllocation(
                address=int(record.address),
                size=int(record.bytes),
                kind=kind,
                name=record.name or Path(record.source or "").name,
                is_release=int(record.memory_operation_type) == int(operation.RELEASE),
                pool=pool,
                pool_reserved=reserved,
            )
        )

    def _called(self, userdata: Any, domain: int, cbid: int, data: Any) -> None:
        try:
            name = self._calls.get((int(domain), int(cbid)))
            if name is None or self._book.is_ours:
                return
            # The runtime's calls make the driver's: one failure is one.
            is_runtime = int(domain) == int(self._cupti.CallbackDomain.RUNTIME_API)
            if int(data.callback_site) != int(self._cupti.ApiCallbackSite.API_EXIT):
                if is_runtime:
                    self._thread.in_runtime = True
                return
            if is_runtime:
                self._thread.in_runtime = False
            elif getattr(self._thread, "in_runtime", False):
                return
            code = ctypes.c_int.from_address(int(data.function_return_value)).value
            if code != 0:
                offset = 2 * _SIZE_OFFSET if name == "cudaMallocPitch" else _SIZE_OFFSET
                size = ctypes.c_size_t.from_address(int(data.function_params) + offset).value
                self._book.observe(ObservedFailure(size, name, code))
        except Exception:
            _log.exception("a call that CUPTI reports cannot be read")
