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


_Block = tuple[int, str, str, int]
"""size, tag, site and #N of a live allocation"""
_Asked = tuple[EventKind, int, int, int, int, bytes, str, str, tuple[str, ...]]
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
        asked = (EventKind.ALLOC, sequence, size, 0, stream_id, self._api, tag, site, current_requests())
        index = self.recorder.begin(*asked)
        try:
            ptr = self._upstream.acquire(size, stream)
        except BaseException as error:
            with self._lock:
                self._failures += 1
            self._finish(index, asked, 0, self._live, error)
            raise
        self._blocks[ptr] = (size, tag, site, sequence)
        with self._lock:
            self._allocations += 1
            live = self._live = self._live + size
            if live > self._peak:
                self._peak = live
        self._finish(index, asked, ptr, live)
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
        asked = (EventKind.FREE, sequence, size, ptr, stream_id, self._api, tag, site, current_requests())
        index = self.recorder.begin(*asked)
        try:
            self._upstream.release(ptr, size, stream)
        except BaseException as error:
            self._blocks[ptr] = block
            self._finish(index, asked, ptr, self._live, error)
            raise
        with self._lock:
            self._frees += 1
            live = self._live = self._live - size
        self._finish(index, asked, ptr, live)

    def note(self, text: str, *, kind: EventKind = EventKind.NOTE, size: int = 0, tag: str = "other") -> None:
        """Record and print what is not a request: a retry, a bypass, a free of an unknown pointer."""
        asked = (kind, 0, size, 0, 0, self._api, tag, "", current_requests())
        free, is_read = self._free(0, self._live)
        outcome = _Outcome(EventState.OK, 0, self._live, free, is_read, text=text)
        self._record(self.recorder.begin(*asked), asked, outcome)
        self._print(asked, outcome)

    # -- outcomes --------------------------------------------------------------------------------------------

    def _finish(
        self, index: int, asked: _Asked, pointer: int, live: int, error: BaseException | None = None
    ) -> None:
        """Record what came of `asked`, and print it by the print rules."""
        size = asked[2]
        if isinstance(error, StickyDeviceError):
            self._device_lost = True
        free, is_read = self._free(size, live, on_failure=error is not None)
        pool = self.gauge.read_pool() if self._pooled and not self._device_lost else None
        retries = 0 if self._exact else self.gauge.last_retries()
        if error is None:
            outcome = _Outcome(EventState.OK, pointer, live, free, is_read, pool, retries)
        else:
            why, code, text = None, 0, f"{type(error).__name__}: {error}"
            if isinstance(error, AllocationError):
                known = error.request
                why, code, text = known.why, known.error_code, known.error
                error.complete(
                    sequence=asked[1],
                    free=known.free if known.free is not None else (free if free >= 0 else None),
                    live=known.live if known.live is not None else live,
                )
            outcome = _Outcome(
                EventState.FAILED, pointer, live, free, is_read, pool, retries, code, why, text or "?"
            )
        self._record(index, asked, outcome)
        if error is not None or size >= self._min_bytes or free < self._low_free_bytes:
            self._print(asked, outcome)

    def _record(self, index: int, asked: _Asked, outcome: _Outcome) -> None:
        if not self.recorder.end(index, *outcome):
            # The ring was lapped while the request ran: it gets a new place, whole.
            self.recorder.end(self.recorder.begin(*asked), *outcome)

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
            # The request had its own outcome; a reading that fails must not change it.
            return estimate, False
        self._last_reading = (free, live)
        return free, True

    def _print(self, asked: _Asked, outcome: _Outcome) -> None:
        if self._lines is None:
            return
        kind, sequence, size, _, _, api, tag, site, requests = asked
        event = TraceEvent(
            kind=kind,
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
            pool_used=outcome.pool[0] if outcome.pool else None,
            pool_reserved=outcome.pool[1] if outcome.pool else None,
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
    pool: tuple[int, int] | None = None
    retries: int = 0
    error_code: int = 0
    why: Why | None = None
    text: str = ""
