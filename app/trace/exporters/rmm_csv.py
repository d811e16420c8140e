"""RMM's log: ``Thread,Time,Action,Pointer,Size,Stream``, as ``rmm::mr::logging_resource_adaptor`` writes it.

RMM's replay benchmark and scripts over its logs read it. The time is that of the day, in UTC. Streams are
decimal, which its log parser expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["encode"]

_BATCH = 1024
_DAY_SECONDS = 86_400


def encode(events: Iterable[TraceEvent], header: TraceHeader) -> Iterator[bytes]:
    """Allocations, failed ones among them, and frees; nothing else has a place in the format."""
    rows = ["Thread,Time,Action,Pointer,Size,Stream\n"]
    for event in events:
        action = _action(event)
        if not action:
            continue
        seconds, nanoseconds = divmod(event.wall_ns, 1_000_000_000)
        minutes, second = divmod(seconds % _DAY_SECONDS, 60)
        hour, minute = divmod(minutes, 60)
        pointer = 0 if event.state is EventState.FAILED else event.pointer
        rows.append(
            f"{event.thread},{hour:02}:{minute:02}:{second:02}.{nanoseconds // 1000:06},"
            f"{action},{pointer:#x},{event.size},{event.stream}\n"
        )
        if len(rows) >= _BATCH:
            yield "".join(rows).encode()
            rows.clear()
    yield "".join(rows).encode()


def _action(event: TraceEvent) -> str:
    if event.kind is EventKind.ALLOC:
        if event.state is EventState.OK:
            return "allocate"
        return "allocate failure" if event.state is EventState.FAILED else ""
    if event.kind is EventKind.FREE and event.state is EventState.OK:
        return "free"
    return ""
