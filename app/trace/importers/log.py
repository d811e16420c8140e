"""Logs with lines like ``[cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=23.10 GiB``, ours or another's.

Such lines are rounded: a size to 0.1 MiB. They are those that were worth printing, and a free may not say
which allocation it ends; then it ends the newest block of its size, of its tag if there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import BinaryIO

from engine.memory.errors import TraceFileError
from engine.memory.lines import parse_line
from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["read_log"]

_MOST_LINE_BYTES = 1 << 16
_FIRST_ADDRESS = 1 << 44
_ALIGNMENT = 512
_PRINTED_LIVE = 16 << 20
"""what `live` may be off by: it is printed in hundredths of a GiB"""
_MOST_SIZE = 1 << 48


def read_log(name: str, file: BinaryIO) -> tuple[TraceHeader, Iterator[TraceEvent]]:
    """Header and events of a log, which errors call `name`. The device is that of its first line of the kind.

    Raises
    ------
    TraceFileError
        The file cannot be read, or no line of it is of this kind.
    """
    lines = _lines(name, file)
    first = next(lines, None)
    if first is None:
        raise TraceFileError(
            f"{name}: no line like `[cuda-alloc] #1 size=32.0 MiB live=0.03 GiB free=23.10 GiB` in it"
        )
    device, event = first
    header = TraceHeader(capacity=1, device=device, api=event.api)
    return header, _Matcher().events(chain([first], lines), device)


def _lines(name: str, file: BinaryIO) -> Iterator[tuple[str, TraceEvent]]:
    """Device and event of each line of the kind."""
    try:
        while data := file.readline(_MOST_LINE_BYTES):
            if b"-alloc]" not in data and b"-free]" not in data:
                continue
            found = parse_line(data.decode("utf-8", "replace"))
            if found is not None and 0 <= found[1].size <= _MOST_SIZE:
                yield found
    except OSError as error:
        raise TraceFileError(f"{name}: cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class _Matcher:
    """Gives frees the allocations that they end, and blocks addresses that are never used again."""

    numbered: dict[int, TraceEvent] = field(default_factory=dict)
    """live blocks by ``#N``"""
    by_size: defaultdict[int, dict[int, TraceEvent]] = field(default_factory=lambda: defaultdict(dict))
    """live blocks by size and ``#N``, the newest last"""
    last: int = 0
    unprinted: int = 0
    live: int = 0
    address: int = _FIRST_ADDRESS

    def events(self, lines: Iterable[tuple[str, TraceEvent]], device: str) -> Iterator[TraceEvent]:
        index = others = 0
        for name, event in lines:
            if name != device:
                others += 1
                continue
            index += 1
            event.index = index
            if index == 1:
                before = event.live - (event.size if event.kind is EventKind.ALLOC else -event.size)
                self.live = before if before > _PRINTED_LIVE else 0
            if event.kind is EventKind.ALLOC:
                self._allocation(event)
            else:
                self._free(event)
            yield event
        said = []
        if self.unprinted:
            said.append(f"{self.unprinted} requests between the numbers of the log were not printed")
        if others:
            said.append(f"{others} lines of other devices were left out")
        for text in said:
            index += 1
            yield TraceEvent(EventKind.NOTE, EventState.OK, 0, index=index, live=self.live, text=text)

    def _allocation(self, event: TraceEvent) -> None:
        if event.sequence > self.last:
            self.unprinted += event.sequence - self.last - 1 if self.last else 0
        else:  # without a number, or one that was used before: another run begins
            event.sequence = self.last + 1
        self.last = event.sequence
        if event.state is not EventState.OK:
            event.live = self.live
            return
        event.pointer = self.address
        self.address += -(-max(event.size, 1) // _ALIGNMENT) * _ALIGNMENT
        self.numbered[event.sequence] = event
        self.by_size[event.size][event.sequence] = event
        self.live += event.size
        event.live = self.live

    def _free(self, event: TraceEvent) -> None:
        if event.state is not EventState.OK:
            return
        block = self.numbered.get(event.sequence) or self._newest(event)
        if block is None:
            event.sequence = 0
            self.live = max(self.live - event.size, 0)
        else:
            del self.numbered[block.sequence]
            del self.by_size[block.size][block.sequence]
            event.sequence, event.pointer, event.size = block.sequence, block.pointer, block.size
            event.site = event.site or block.site
            if event.tag == "other":
                event.tag = block.tag
            self.live -= block.size
        event.live = self.live

    def _newest(self, event: TraceEvent) -> TraceEvent | None:
        blocks = self.by_size.get(event.size, {})
        same_tag = (block for block in reversed(blocks.values()) if block.tag == event.tag)
        return next(same_tag, None) or next(reversed(blocks.values()), None)
