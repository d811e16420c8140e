"""The trace: every request recorded before it is made and completed after it, the large ones printed."""

from __future__ import annotations

import itertools
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

from cuda.core import MemoryResource

from engine.memory.adaptors.adaptor import MemoryAdaptor, gauge_of
from engine.memory.base import DeviceGauge
from engine.memory.errors import AllocationError, StickyDeviceError, UnknownPointerError, Why
from engine.memory.lines import LineWriter, format_line
from engine.memory.record import EventKind, EventState, TraceEvent
from engine.memory.recorder import FlightRecorder
from engine.memory.scope import call_site, current_requests, current_tag

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = ["TracingMemoryResource"]

_READ_FREE_FROM = 16 << 20
"""Requests of this size and more are worth the driver's own figure of free memory."""


_OK = int(EventState.OK)
_ALLOC = int(EventKind.ALLOC)
_FREE = int(EventKind.FREE)

_Block = tuple[int, str, str, int]
"""size, tag, site and #N of a live allocation"""
_Asked = tuple[int, int, int, int, int, bytes, str, str, tuple[str, ...]]
"""kind, #N, size, pointer, stream, api, tag, site, requests: the arguments of `FlightRecorder.begin`"""


class TracingMemoryResource(MemoryAdaptor):
    """Records every request, free and failure in `recorder`, and prints lines to `lines`.

    Lines are printed for requests and frees of `min_bytes` and more, for every failure, and for everything
    while less than `low_free_bytes` are free. ``#N`` counts all requests.

    ``free`` is read from `gauge` where that costs nothing (`DeviceGauge.exact`), else for requests of 16
    MiB and more, below `low_free_bytes`, and on failure; in between it is the last reading less what became
    live since. Each record says which.

    Parameters
    ----------
    gauge : DeviceGauge, optional
        Reads the device; the one at the bottom of `upstream` if left out.

    Raises
    ------
    TypeError
        No gauge was given and `upstream` has none.
    """

    def __init__(
        self,
        upstream: MemoryResource,
        recorder: FlightRecorder,
        *,
        gauge: DeviceGauge | None = None,
        lines: LineWriter | None = None,
        min_bytes: int = 16 << 20,
        low_free_bytes: int = 2 << 30,
    ) -> None:
        super().__init__(upstream)
        gauge = gauge if gauge is not None else gauge_of(upstream)
        if gauge is None:
            raise TypeError(f"{type(upstream).__name__} cannot tell its free bytes: a gauge is needed")
        self.recorder = recorder
        self.gauge = gauge
        self._lines = lines
        self._min_bytes = min_bytes
        self._low_free_bytes = low_free_bytes
        self._api = gauge.api.encode()
        self._exact = gauge.exact
        self._read_free = gauge.read_free
        self._pooled = gauge.read_pool() is not None
        self._next_sequence = itertools.count(1).__next__
        self._lock = RLock()
        self._blocks: dict[int, _Block] = {}
        self._allocations = self._frees = self._failures = 0
        self._live = self._peak = 0
        self._device_lost = False
        self._last_reading: tuple[int, int] | None = None
        """(free, live) when the driver was last asked"""

    # -- counts ----------------------------------------------------------------------------------------------

    @property
    def allocations(self) -> int:
        """Requests that succeeded."""
        return self._allocations

    @property
    def frees(self) -> int:
        return self._frees

    @property
    def failures(self) -> int:
        """Requests that failed."""
        return self._failures

    @property
    def live(self) -> int:
        """Bytes live through this adaptor."""
        return self._live

    @property
    def peak(self) -> int:
        """Most bytes live at once."""
        return self._peak

    def live_by_tag(self) -> dict[str, int]:
        """Bytes live by full tag, without the tags that have none."""
        totals: dict[str, int] = {}
        for size, tag, _, _ in list(self._blocks.values()):
            totals[tag] = totals.get(tag, 0) + size
        return {tag: size for tag, size in totals.items() if size}

    # -- requests --------------------------------------------------------------------------------------------

    def acquire(self, size: int, stream: Stream | None) -> int:
        tag = current_tag()
        site = call_site()
        sequence = self._next_sequence()
        stream_id = 0 if stream is None else self._stream_id(stream)
        asked = (_ALLOC, sequence, size, 0, stream_id, self._api, tag, site, current_requests())
        index = self.recorder.begin(*asked)
        try:
            ptr = self._upstream.acquire(size, stream)
        except BaseException as error:
            with self._lock:
                self._failures += 1
            self._failed(index, asked, error)
            raise
        self._blocks[ptr] = (size, tag, site, sequence)
        with self._lock:
            self._allocations += 1
            live = self._live = self._live + size
            if live > self._peak:
                self._peak = live
        self._succeeded(index, asked, ptr, live)
        return ptr

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        block = self._blocks.pop(ptr, None)
        if block is None or block[0] != size:
            if block is not None:
                self._blocks[ptr] = block
            problem = UnknownPointerError(ptr, size, block[0] if block else None)
            self.note(str(problem))
            raise problem
        _, tag, site, sequence = block
        stream_id = 0 if stream is None else self._stream_id(stream)
        asked = (_FREE, sequence, size, ptr, stream_id, self._api, tag, site, current_requests())
        index = self.recorder.begin(*asked)
        try:
            self._upstream.release(ptr, size, stream)
        except BaseException as error:
            self._blocks[ptr] = block
            self._failed(index, asked, error)
            raise
        with self._lock:
            self._frees += 1
            live = self._live = self._live - size
        self._succeeded(index, asked, ptr, live)

    def note(
        self,
        text: str,
        *,
        kind: EventKind = EventKind.NOTE,
        size: int = 0,
        tag: str = "other",
        always: bool = True,
    ) -> None:
        """Record and print what is not a request: a retry, a bypass, a free of an unknown pointer.

        Unless it is to be printed `always`, a small one is printed as a small request would be.
        """
        asked = (kind, 0, size, 0, 0, self._api, tag, "", current_requests())
        free, is_read = self._free(0, self._live)
        outcome = _Outcome(EventState.OK, 0, self._live, free, is_read, text=text)
        self.recorder.end(self.recorder.begin(*asked), *outcome)
        if always or size >= self._min_bytes or free < self._low_free_bytes:
            self._print(asked, outcome)

    # -- outcomes --------------------------------------------------------------------------------------------

    def _succeeded(self, index: int, asked: _Asked, pointer: int, live: int) -> None:
        """Record an outcome, print it by the print rules. Runs with every request: no detours."""
        size = asked[2]
        if self._exact:
            free = self._read_free()
            is_done = self.recorder.end(index, _OK, pointer, live, free, True)
            if is_done and size < self._min_bytes and free >= self._low_free_bytes:
                return
            outcome = _Outcome(EventState.OK, pointer, live, free, True)
        else:
            free, is_read = self._free(size, live)
            outcome = _Outcome(
                EventState.OK, pointer, live, free, is_read, *self._pool(), self.gauge.last_retries()
            )
            is_done = self.recorder.end(index, *outcome)
        if not is_done:
            self._record_again(asked, outcome)
        if size >= self._min_bytes or free < self._low_free_bytes:
            self._print(asked, outcome)

    def _failed(self, index: int, asked: _Asked, error: BaseException) -> None:
        """Record a failure and print it, and complete the exception that carries it."""
        self._device_lost = self._device_lost or isinstance(error, StickyDeviceError)
        live = self._live
        free, is_read = self._free(asked[2], live, on_failure=True)
        why, code, text = None, 0, f"{type(error).__name__}: {error}"
        if isinstance(error, AllocationError):
            request = error.request
            why, code, text = request.why, request.error_code, request.error
            error.complete(
                sequence=asked[1],
                tag=asked[6],
                site=asked[7],
                requests=asked[8],
                free=request.free if request.free is not None else (free if is_read else None),
                live=request.live if request.live is not None else live,
            )
        outcome = _Outcome(
            EventState.FAILED,
            asked[3],
            live,
            free,
            is_read,
            *self._pool(),
            0 if self._exact else self.gauge.last_retries(),
            code,
            why,
            text or "no error text",
        )
        if not self.recorder.end(index, *outcome):
            self._record_again(asked, outcome)
        self._print(asked, outcome)

    def _record_again(self, asked: _Asked, outcome: _Outcome) -> None:
        """The ring was lapped while the request ran: it gets a new place, whole."""
        self.recorder.end(self.recorder.begin(*asked), *outcome)

    def _pool(self) -> tuple[int, int]:
        """(used, reserved) bytes of the pool, (-1, -1) where there is none or it cannot be read."""
        if not self._pooled or self._device_lost:
            return -1, -1
        try:
            return self.gauge.read_pool() or (-1, -1)
        except Exception:
            # The request has had its outcome; a reading that fails must not change it.
            return -1, -1

    def _free(self, size: int, live: int, *, on_failure: bool = False) -> tuple[int, bool]:
        """Free bytes of the device, -1 if unknown, and whether they were read rather than estimated."""
        if self._exact:
            return self.gauge.read_free(), True
        estimate = -1
        reading = self._last_reading
        if reading is not None:
            estimate = reading[0] - (live - reading[1])
            if size < _READ_FREE_FROM and estimate >= self._low_free_bytes and not on_failure:
                return estimate, False
        if self._device_lost:  # nothing more is asked of the driver
            return estimate, False
        try:
            free = self.gauge.read_free()
        except Exception:
            # As for the pool.
            return estimate, False
        self._last_reading = (free, live)
        return free, True

    def _print(self, asked: _Asked, outcome: _Outcome) -> None:
        if self._lines is None:
            return
        kind, sequence, size, _, _, api, tag, site, requests = asked
        event = TraceEvent(
            kind=EventKind(kind),
            state=outcome.state,
            size=size,
            sequence=sequence,
            tag=tag,
            site=site,
            requests=requests,
            request_count=len(requests),
            api=api.decode(),
            pointer=outcome.pointer,
            live=outcome.live,
            free=outcome.free if outcome.free >= 0 else None,
            free_is_read=outcome.free_is_read,
            pool_used=outcome.pool_used if outcome.pool_used >= 0 else None,
            pool_reserved=outcome.pool_reserved if outcome.pool_reserved >= 0 else None,
            retries=outcome.retries,
            error_code=outcome.error_code,
            why=outcome.why,
            text=outcome.text,
        )
        self._lines.write(format_line(event, self.gauge.device))

    def _stream_id(self, stream: Stream) -> int:
        """The stream's handle; 0 on the host, where a stream means nothing."""
        if not self.is_device_accessible:
            return 0
        with suppress(Exception):
            return int(stream.handle)
        return 0


class _Outcome(NamedTuple):
    """The arguments of `FlightRecorder.end` after the index."""

    state: EventState
    pointer: int
    live: int
    free: int
    free_is_read: bool
    pool_used: int = -1
    pool_reserved: int = -1
    retries: int = 0
    error_code: int = 0
    why: Why | None = None
    text: str = ""
