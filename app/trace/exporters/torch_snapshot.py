"""A memory snapshot as torch pickles it, for pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py``.

The pickle is of protocol 4 and holds dictionaries, lists, strings and integers only. It is written opcode by
opcode as the events come, since `pickle` would want all of them at once: a list may be appended to in pieces,
and what was written once (names, frames) is referred to by its place in the memo. Only opcodes that the
viewer's own unpickler in JavaScript knows are used.

Each block is a segment of its own: the trace knows what was asked of the driver, not how the driver packs it.
``segment_alloc`` comes before ``alloc``, and ``free_requested``, ``free_completed`` and ``segment_free`` in
this order behind one another. A frame is the line of code that asked, and its function is the tag.

A block of 0 bytes is left out: the viewer finds no segment for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.memory.record import EventKind, EventState, TraceEvent, TraceHeader

__all__ = ["encode"]

_BATCH = 1000
"""entries appended at once, as `pickle` does; the viewer passes them as arguments of one call"""
_MOST_MEMO = 65_536

_PROTOCOL_4 = b"\x80\x04"
_EMPTY_DICT = b"}"
_EMPTY_LIST = b"]"
_MARK = b"("
_SET_ITEMS = b"u"
_APPEND = b"a"
_APPENDS = b"e"
_MEMOIZE = b"\x94"
_FALSE = b"\x89"
_TUPLE_2 = b"\x86"
_STOP = b"."


def encode(events: Iterable[TraceEvent], header: TraceHeader) -> Iterator[bytes]:
    """The snapshot at the end of the trace, with the whole trace of device 0."""
    pickle = _Pickle()
    live: dict[int, TraceEvent] = {}
    pickle.put(_PROTOCOL_4, _EMPTY_DICT, _MARK)
    pickle.text("device_traces")
    pickle.put(_EMPTY_LIST, _EMPTY_LIST, _MARK)
    entries = 0
    for event in events:
        entries += _add_entries(pickle, event, live)
        if entries >= _BATCH:
            pickle.put(_APPENDS)
            yield pickle.take()
            pickle.put(_MARK)
            entries = 0
    pickle.put(_APPENDS, _APPEND)
    pickle.text("segments")
    pickle.put(_EMPTY_LIST)
    blocks = sorted(live.values(), key=lambda event: event.pointer)
    for start in range(0, len(blocks), _BATCH):
        pickle.put(_MARK)
        for event in blocks[start : start + _BATCH]:
            _add_segment(pickle, event)
        pickle.put(_APPENDS)
        yield pickle.take()
    pickle.text("allocator_settings")
    pickle.put(_EMPTY_DICT, _MARK)
    for key, value in (("device", header.device), ("api", header.api)):
        pickle.text(key)
        pickle.text(value)
    pickle.put(_SET_ITEMS, _SET_ITEMS, _STOP)
    yield pickle.take()


def _add_entries(pickle: _Pickle, event: TraceEvent, live: dict[int, TraceEvent]) -> int:
    """Add what `event` is in the device's trace, and say how many entries those are. `live` follows."""
    actions: tuple[str, ...] = ()
    if not event.size:
        pass
    elif event.kind is EventKind.ALLOC and event.state is EventState.OK:
        live[event.pointer] = event
        actions = ("segment_alloc", "alloc")
    elif event.kind is EventKind.FREE and event.state is EventState.OK:
        live.pop(event.pointer, None)
        actions = ("free_requested", "free_completed", "segment_free")
    elif event.kind is EventKind.ALLOC and event.state is EventState.FAILED:
        actions = ("oom",)
    for action in actions:
        pickle.entry(action, event)
    return len(actions)


def _add_segment(pickle: _Pickle, event: TraceEvent) -> None:
    """Add the segment of a live block, which fills it."""
    pickle.put(_EMPTY_DICT, _MARK)
    pickle.item("device", 0)
    pickle.item("address", event.pointer)
    for name in ("total_size", "allocated_size", "active_size", "requested_size"):
        pickle.item(name, event.size)
    pickle.item("stream", event.stream)
    pickle.text("segment_type")
    pickle.text("large" if event.size > 1 << 20 else "small")
    pickle.item("segment_pool_id", 0)
    pickle.put(_integer(0), _TUPLE_2)
    pickle.text("is_expandable")
    pickle.put(_FALSE)
    pickle.frames(event)
    pickle.text("blocks")
    pickle.put(_EMPTY_LIST, _EMPTY_DICT, _MARK)
    pickle.item("address", event.pointer)
    pickle.item("size", event.size)
    pickle.item("requested_size", event.size)
    pickle.text("state")
    pickle.text("active_allocated")
    pickle.frames(event)
    pickle.put(_SET_ITEMS, _APPEND, _SET_ITEMS)


class _Pickle:
    """Collects opcodes in the order in which they stand in the file."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._memo: dict[object, bytes] = {}
        """what is in the file already, and the opcode that fetches it"""
        self._starts: dict[str, bytes] = {}
        """how an entry of an action begins, up to its address"""
        self._middle = (b"", b"", b"", b"")

    def put(self, *opcodes: bytes) -> None:
        self._parts.extend(opcodes)

    def take(self) -> bytes:
        """What was collected since the last call."""
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    def entry(self, action: str, event: TraceEvent) -> None:
        """What `event` is in the device's trace as `action`."""
        start = self._starts.get(action)
        frames = self._memo.get((event.tag, event.site))
        if start is None or frames is None:
            self._first_entry(action, event)
            return
        place = (event.free or 0) if action == "oom" else event.pointer
        # Nothing is new in it: a template, since there are millions.
        size, stream, time, key = self._middle
        self._parts += (
            start,
            _integer(place),
            size,
            _integer(event.size),
            stream,
            _integer(event.stream),
            time,
            _integer(event.wall_ns // 1000),
            key,
            frames,
            _SET_ITEMS,
        )

    def _first_entry(self, action: str, event: TraceEvent) -> None:
        place = "device_free" if action == "oom" else "addr"
        self.put(_EMPTY_DICT, _MARK)
        self.text("action")
        self.text(action)
        self.item(place, (event.free or 0) if action == "oom" else event.pointer)
        self.item("size", event.size)
        self.item("stream", event.stream)
        self.item("time_us", event.wall_ns // 1000)
        self.frames(event)
        self.put(_SET_ITEMS)
        known = self._memo
        if all(key in known for key in ("action", action, place, "size", "stream", "time_us", "frames")):
            self._starts[action] = b"".join(
                (_EMPTY_DICT, _MARK, known["action"], known[action], known[place])
            )
            self._middle = (known["size"], known["stream"], known["time_us"], known["frames"])

    def item(self, key: str, value: int) -> None:
        """A key and an integer of a dictionary."""
        self.text(key)
        self._parts.append(_integer(value))

    def text(self, value: str) -> None:
        known = self._memo.get(value)
        if known is None:
            data = value.encode("utf-8", "replace")
            head = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + len(data).to_bytes(4, "little")
            self._parts.append(head + data)
            self._remember(value)
        else:
            self._parts.append(known)

    def frames(self, event: TraceEvent) -> None:
        """The key ``frames`` and the line of code that asked, by the name of what it asked for."""
        self.text("frames")
        key = (event.tag, event.site)
        known = self._memo.get(key)
        if known is not None:
            self._parts.append(known)
            return
        filename, _, line = event.site.rpartition(":")
        self.put(_EMPTY_LIST)
        self._remember(key)
        self.put(_EMPTY_DICT, _MARK)
        self.text("filename")
        self.text(filename if line.isdecimal() else event.site)
        self.item("line", int(line) if line.isdecimal() and len(line) < 10 else 0)
        self.text("name")
        self.text(event.tag)
        self.put(_SET_ITEMS, _APPEND)

    def _remember(self, key: object) -> None:
        """Put what was written last into the memo, unless that is full."""
        place = len(self._memo)
        if place >= _MOST_MEMO:
            return
        self._parts.append(_MEMOIZE)
        if place < 256:
            self._memo[key] = b"h" + bytes([place])
        else:
            self._memo[key] = b"j" + place.to_bytes(4, "little")


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if value < 1 << 63:
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
    return b"\x8a\x09" + value.to_bytes(9, "little")
