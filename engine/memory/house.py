"""The memory house: the one place that decides which adaptors stand over a resource, and in which order.

::

    engine ── TracingMemoryResource      every request and its outcome, refusals of the limit included
              └─ StatisticsMemoryResource    counts the same
                 └─ LimitingMemoryResource       refuses what passes the cap
                    └─ the resource                  host, cudaMalloc, pool, plan

Each floor is built only if it is asked for. With nothing on, `MemoryHouse.resource` *is* the resource.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self, TextIO

from cuda.core import MemoryResource

from engine.memory.adaptors import (
    LimitingMemoryResource,
    StatisticsMemoryResource,
    TracingMemoryResource,
    gauge_of,
)
from engine.memory.base import BypassReporter, DeviceGauge
from engine.memory.ledger import Ledger
from engine.memory.lines import LineWriter, format_line
from engine.memory.record import EventKind, TraceHeader
from engine.memory.recorder import FlightRecorder
from engine.memory.settings import TraceSettings

__all__ = ["MemoryHouse"]


class MemoryHouse:
    """A resource with what watches it. Built by `build`.

    Attributes
    ----------
    resource : MemoryResource
        What the engine is handed: the outermost adaptor, or the bare resource when nothing is on.
    gauge : DeviceGauge
    tracing : TracingMemoryResource or None
    statistics : StatisticsMemoryResource or None
    limiting : LimitingMemoryResource or None
    recorder : FlightRecorder or None
        There whenever tracing is on: on a file if the settings name one, else in memory.
    lines : LineWriter or None
    """

    def __init__(
        self,
        resource: MemoryResource,
        gauge: DeviceGauge,
        *,
        tracing: TracingMemoryResource | None = None,
        statistics: StatisticsMemoryResource | None = None,
        limiting: LimitingMemoryResource | None = None,
        recorder: FlightRecorder | None = None,
        lines: LineWriter | None = None,
    ) -> None:
        self.resource = resource
        self.gauge = gauge
        self.tracing = tracing
        self.statistics = statistics
        self.limiting = limiting
        self.recorder = recorder
        self.lines = lines

    @classmethod
    def build(
        cls,
        upstream: MemoryResource,
        settings: TraceSettings,
        *,
        output: TextIO | None = None,
        gauge: DeviceGauge | None = None,
        limit: int | None = None,
    ) -> Self:
        """The house over `upstream` that `settings` ask for.

        Parameters
        ----------
        output
            Where trace lines are printed; None prints none. It stays the caller's.
        gauge
            Reads the device; `upstream`'s own if left out.
        limit
            Most bytes that may be live, below what the device has.

        Raises
        ------
        TraceFileError
            The flight recorder's file cannot be created.
        TypeError
            `upstream` cannot tell its free bytes and no gauge was given.
        """
        gauge = gauge if gauge is not None else gauge_of(upstream)
        if gauge is None:
            raise TypeError(f"{type(upstream).__name__} cannot tell its free bytes: a gauge is needed")
        resource = upstream
        limiting = statistics = tracing = recorder = lines = None
        if limit is not None:
            resource = limiting = LimitingMemoryResource(resource, limit)
        if settings.stats:
            resource = statistics = StatisticsMemoryResource(resource)
        if settings.trace:
            header = TraceHeader(
                capacity=settings.records,
                device=gauge.device,
                api=gauge.api,
                total=gauge.total,
                min_bytes=settings.min_bytes,
                low_free_bytes=settings.low_free_bytes,
            )
            if settings.file is not None:
                recorder = FlightRecorder.create(settings.file, header)
            else:
                recorder = FlightRecorder.in_memory(header)
            lines = LineWriter(output) if output is not None else None
            resource = tracing = TracingMemoryResource(
                resource,
                recorder,
                gauge=gauge,
                lines=lines,
                min_bytes=settings.min_bytes,
                low_free_bytes=settings.low_free_bytes,
            )
            if isinstance(gauge, BypassReporter):
                gauge.report_bypasses(partial(_note_bypass, tracing))
        return cls(
            resource,
            gauge,
            tracing=tracing,
            statistics=statistics,
            limiting=limiting,
            recorder=recorder,
            lines=lines,
        )

    @property
    def available(self) -> int:
        """Bytes that can still be asked for: what the device has free, or less if the limit leaves less."""
        free = self.gauge.read_free()
        return free if self.limiting is None else min(free, self.limiting.available)

    def available_in(self, requests: int) -> int:
        """Bytes that `requests` more requests can have together: the device may round each of them up.

        A limit counts the bytes that are asked for, the device those that it gives.
        """
        step: int = getattr(self.gauge, "granularity", 1)
        free = self.gauge.read_free() - requests * (step - 1)
        return free if self.limiting is None else min(free, self.limiting.available)

    def ledger(self, moment: str = "") -> Ledger:
        """The ledger now. With neither trace nor statistics no tag is known: all of it is residual."""
        watcher = self.tracing or self.statistics
        tags = watcher.live_by_tag() if watcher is not None else {}
        overheads = self.gauge.overheads()
        total = self.gauge.total
        is_read = True
        try:
            free = self.gauge.read_free()
        except Exception:  # the context is lost: a ledger of the failure is wanted all the same
            is_read = False
            free = max(total - sum(tags.values()) - overheads.total, 0)
        return Ledger.close(
            total=total,
            free=free,
            free_is_read=is_read,
            tags=tags,
            overheads=overheads,
            moment=moment,
            device=self.gauge.device,
        )

    def statistics_dict(self) -> dict[str, Any] | None:
        """The counts in plain types; None when statistics are off."""
        return self.statistics.statistics().to_dict() if self.statistics is not None else None

    def last_lines(self, count: int = 100) -> list[str]:
        """The trace's last `count` records as lines, the unprinted ones too; empty when off or closed."""
        if self.recorder is None or self.recorder.closed:
            return []
        with self.recorder.reader() as reader:
            piece = reader.last(count)
            return [format_line(event, reader.header.device) for event in piece.events()]

    def stop_printing(self) -> None:
        """Record, but print no more: after a fatal failure its lines must stay the last. Idempotent."""
        if self.lines is not None:
            self.lines.close()

    def close(self) -> None:
        """Close the recorder and stop printing. Buffers may still be freed afterwards. Idempotent."""
        if self.recorder is not None:
            self.recorder.close()
        if self.lines is not None:
            self.lines.close()


def _note_bypass(tracing: TracingMemoryResource, size: int, text: str, *, expected: bool) -> None:
    if not tracing.recorder.closed:
        tracing.note(text, kind=EventKind.BYPASS, size=size, always=not expected)
