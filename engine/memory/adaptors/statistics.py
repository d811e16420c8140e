"""Counts: how many requests, frees and failures, how many bytes, live and at the peak, in all and by tag."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any

from cuda.core import MemoryResource

from engine.memory.adaptors.adaptor import MemoryAdaptor
from engine.memory.errors import AllocationError, UnknownPointerError
from engine.memory.scope import current_tag

if TYPE_CHECKING:
    from cuda.core import Stream

__all__ = ["MemoryStatistics", "StatisticsMemoryResource", "TagStatistics"]


@dataclass(slots=True)
class TagStatistics:
    """Counts of one tag, or of all."""

    allocations: int = 0
    """requests that succeeded"""
    frees: int = 0
    failures: int = 0
    """requests that failed; never counted as allocations"""
    allocated_bytes: int = 0
    freed_bytes: int = 0
    peak_bytes: int = 0
    """most bytes live at once"""

    @property
    def live_bytes(self) -> int:
        return self.allocated_bytes - self.freed_bytes

    @property
    def live_blocks(self) -> int:
        return self.allocations - self.frees

    def to_dict(self) -> dict[str, int]:
        """Plain types, with the derived figures."""
        return {**asdict(self), "live_bytes": self.live_bytes, "live_blocks": self.live_blocks}


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """The counts at one moment."""

    total: TagStatistics
    by_tag: dict[str, TagStatistics]
    """by full tag, in the order they were first seen"""
    failures_by_why: dict[str, int] = field(default_factory=dict)
    """by classification; ``unclassified`` for errors that carry none"""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            "total": self.total.to_dict(),
            "by_tag": {tag: counts.to_dict() for tag, counts in self.by_tag.items()},
            "failures_by_why": dict(self.failures_by_why),
        }


class StatisticsMemoryResource(MemoryAdaptor):
    """Counts what passes through it. A free is counted once, after it happened, by the allocation's tag."""

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self._lock = RLock()
        self._total = TagStatistics()
        self._tags: dict[str, TagStatistics] = {}
        self._blocks: dict[int, tuple[int, TagStatistics]] = {}
        self._why: dict[str, int] = {}

    def statistics(self) -> MemoryStatistics:
        """A copy of the counts, consistent in itself."""
        with self._lock:
            return MemoryStatistics(
                _copy(self._total),
                {tag: _copy(counts) for tag, counts in self._tags.items()},
                dict(self._why),
            )

    @property
    def live(self) -> int:
        """Bytes live through this adaptor."""
        return self._total.live_bytes

    def live_by_tag(self) -> dict[str, int]:
        """Bytes live by full tag, without the tags that have none."""
        counts = self.statistics().by_tag
        return {tag: count.live_bytes for tag, count in counts.items() if count.live_bytes}

    def acquire(self, size: int, stream: Stream | None) -> int:
        tag = current_tag()
        counts = self._tags.get(tag)
        if counts is None:
            counts = self._tags.setdefault(tag, TagStatistics())
        try:
            ptr = self._upstream.acquire(size, stream)
        except BaseException as error:
            self._count_failure(counts, error)
            raise
        block = (size, counts)
        total = self._total
        # Nothing between these lines can run the garbage collector, whose frees would come in between.
        with self._lock:
            total.allocations += 1
            total.allocated_bytes += size
            live = total.allocated_bytes - total.freed_bytes
            if live > total.peak_bytes:
                total.peak_bytes = live
            counts.allocations += 1
            counts.allocated_bytes += size
            live = counts.allocated_bytes - counts.freed_bytes
            if live > counts.peak_bytes:
                counts.peak_bytes = live
            self._blocks[ptr] = block
        return ptr

    def release(self, ptr: int, size: int, stream: Stream | None) -> None:
        block = self._blocks.pop(ptr, None)
        if block is None:
            raise UnknownPointerError(ptr, size)
        try:
            if block[0] != size:
                raise UnknownPointerError(ptr, size, block[0])
            self._upstream.release(ptr, size, stream)
        except BaseException:
            self._blocks[ptr] = block
            raise
        counts = block[1]
        total = self._total
        with self._lock:
            total.frees += 1
            total.freed_bytes += size
            counts.frees += 1
            counts.freed_bytes += size

    def _count_failure(self, counts: TagStatistics, error: BaseException) -> None:
        why = error.why.value if isinstance(error, AllocationError) else "unclassified"
        with self._lock:
            self._total.failures += 1
            counts.failures += 1
            self._why[why] = self._why.get(why, 0) + 1


def _copy(counts: TagStatistics) -> TagStatistics:
    return TagStatistics(**asdict(counts))
