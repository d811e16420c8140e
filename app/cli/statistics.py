"""The table of ``--alloc-stats``: what was allocated, for what."""

from __future__ import annotations

from app.cli.plain_text import aligned
from engine.memory.adaptors import MemoryStatistics, TagStatistics
from engine.memory.errors import describe_bytes

_HEADINGS = ("memory by tag", "allocations", "frees", "failures", "allocated", "live")


def statistics_table(statistics: MemoryStatistics) -> list[str]:
    """Lines of a table: a row for each first segment of the tags, as they were first seen, and the total."""
    segments: dict[str, TagStatistics] = {}
    for tag, counts in statistics.by_tag.items():
        segment = segments.setdefault(tag.partition("/")[0], TagStatistics())
        segment.allocations += counts.allocations
        segment.frees += counts.frees
        segment.failures += counts.failures
        segment.allocated_bytes += counts.allocated_bytes
        segment.freed_bytes += counts.freed_bytes
    rows = [
        _HEADINGS,
        *(_row(name, counts) for name, counts in segments.items()),
        _row("total", statistics.total),
    ]
    return [*aligned(rows), f"peak: {describe_bytes(statistics.total.peak_bytes)}"]


def _row(name: str, counts: TagStatistics) -> tuple[str, ...]:
    numbers = (counts.allocations, counts.frees, counts.failures)
    sizes = (counts.allocated_bytes, counts.live_bytes)
    return (name, *(f"{number:,}" for number in numbers), *map(describe_bytes, sizes))
