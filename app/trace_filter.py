"""Which records of a trace somebody wants, and how they are written for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from engine.memory.record import EventKind, EventState, TraceEvent

__all__ = ["KINDS", "TraceFilter", "event_json", "event_kind"]

KINDS = ("alloc", "free", "failed", "pending", "note", "bypass", "gap")
_GLOB = frozenset("*?[")


def event_kind(event: TraceEvent) -> str:
    """One of `KINDS`: a request that failed or has no outcome yet is of a kind of its own."""
    if event.kind in (EventKind.ALLOC, EventKind.FREE):
        if event.state is EventState.FAILED:
            return "failed"
        if event.state is not EventState.OK:
            return "pending"
    return event.kind.name.lower()


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """A choice of records. Gaps always pass: who filters wants to know what could not be looked at."""

    min_size: int = 0
    """bytes; notes have none, and pass"""
    tag: str = ""
    """a beginning (``weights/``), or a pattern if it has one of ``*?[`` in it (``*.down_proj``)"""
    kinds: frozenset[str] = frozenset()
    """of `KINDS`; empty: all"""

    @property
    def passes_all(self) -> bool:
        return self == TraceFilter()

    def passes(self, event: TraceEvent) -> bool:
        """Whether `event` is wanted."""
        if event.kind is EventKind.GAP:
            return True
        if event.size < self.min_size and event.kind is not EventKind.NOTE:
            return False
        if self.tag:
            matches = (
                fnmatchcase(event.tag, self.tag) if _GLOB & set(self.tag) else event.tag.startswith(self.tag)
            )
            if not matches:
                return False
        return not self.kinds or event_kind(event) in self.kinds


def event_json(event: TraceEvent) -> bytes:
    """`event` as a JSON object: sizes in bytes, times in nanoseconds, unknown figures null."""
    facts: Mapping[str, Any] = {
        "index": event.index,
        "kind": event_kind(event),
        "of": event.kind.name.lower(),
        "state": event.state.name.lower(),
        "sequence": event.sequence,
        "size": event.size,
        "live": event.live,
        "free": event.free,
        "free_is_read": event.free_is_read,
        "tag": event.tag,
        "site": event.site,
        "requests": event.requests,
        "request_count": event.request_count,
        "api": event.api,
        "pointer": event.pointer,
        "stream": event.stream,
        "thread": event.thread,
        "pool_used": event.pool_used,
        "pool_reserved": event.pool_reserved,
        "wall_ns": event.wall_ns,
        "started_ns": event.started_ns,
        "finished_ns": event.finished_ns,
        "retries": event.retries,
        "error_code": event.error_code,
        "why": None if event.why is None else event.why.value,
        "text": event.text,
    }
    return msgspec.json.encode(facts)
