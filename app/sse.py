"""Server-sent events as a client reads them (WHATWG HTML, 9.2): the data of each, out of bytes as they come.

Lines end with LF, CR or CRLF and with nothing else: JSON may hold U+2028 and U+0085 as they are, at which
`str.splitlines` (and so ``httpx.Response.iter_lines``) would cut it.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["MAX_EVENT_BYTES", "EventDecoder", "EventTooLargeError"]

MAX_EVENT_BYTES = 16 << 20
"""of one event; more is a server that never ends a line"""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLargeError(ValueError):
    """An event is larger than a client is willing to keep."""


class EventDecoder:
    """Puts events together. What has no blank line after it when the stream ends is no event."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        """of the line that has not ended"""
        self._data: list[bytes] = []
        """of the event that has not ended"""
        self._size = 0
        self._after_return = False
        self._at_start = True

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of each event that `received` ends. Events without data are none.

        Raises
        ------
        EventTooLargeError
            What has come of an event is more than `max_bytes`.
        """
        if not received:
            return
        ends_with_return = received.endswith(b"\r")
        if self._after_return and received.startswith(b"\n"):
            received = received[1:]
        self._after_return = ends_with_return
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = received.split(b"\n")
        self._keep(self._pieces, first)
        for piece in others:
            line = b"".join(self._pieces)
            self._pieces.clear()
            if (data := self._end_of(line)) is not None:
                yield data
            self._keep(self._pieces, piece)

    def _end_of(self, line: bytes) -> bytes | None:
        """Take a whole line; the event's data if it ends one."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            data = b"\n".join(self._data)
            self._data.clear()
            self._size = 0
            return data or None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        else:
            self._size -= len(line)
        return None

    def _keep(self, pieces: list[bytes], piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise EventTooLargeError(f"an event of more than {self._max_bytes} bytes")
        if piece:
            pieces.append(piece)
