"""Why requests for memory fail: the one table of causes, for records, plans, traces and the manual.

docs/ALLOC_TRACE.md shows it; a test compares the two. Each cause is produced by a test of the resource or the
adaptor that tells it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.memory.errors import Why

__all__ = ["CAUSES", "Cause"]


@dataclass(frozen=True, slots=True)
class Cause:
    """What a classification means to a person."""

    meaning: str
    helps: str
    """what usually helps; empty if nothing is to be done"""

    def __str__(self) -> str:
        return f"{self.meaning}; usually helps: {self.helps}" if self.helps else self.meaning


CAUSES: Mapping[Why, Cause] = {
    Why.FULL: Cause(
        "the device has fewer free bytes than were asked for",
        "fewer or smaller: `--kv-cache-memory`, `--max-num-seqs`, `--max-model-len`",
    ),
    Why.FRAGMENTATION: Cause(
        "the bytes are free, but not in one piece, or frees are not observed yet",
        "the same, or another allocator",
    ),
    Why.ADDRESS_SPACE: Cause(
        "the bytes may be there, but the system would not map them", "`ulimit -v`, overcommit settings"
    ),
    Why.CAP: Cause("a limit that vtserve was told to keep", "`--gpu-memory-utilization`, `--device-memory`"),
    Why.NEIGHBOUR: Cause("another process holds the bytes", "end it, or wait"),
    Why.EARLIER_ERROR: Cause(
        "an earlier asynchronous error that this call reported; the request is not to blame",
        "find the kernel; the process must be started again",
    ),
    Why.INJECTED: Cause("a test asked for it", ""),
}
