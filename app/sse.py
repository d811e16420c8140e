"""Server-sent events as a client reads them (WHATWG HTML, 9.2): the data of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

__all__ = ["DONE", "EventData", "iterate_data", "iterate_data_of"]

DONE = "[DONE]"
"""ends the streams of OpenAI's protocol"""


class EventData:
    """Puts events together from lines."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def feed(self, line: str) -> str | None:
        """The data of the event that `line` ends; None if it ends none."""
        if not line:
            data, self._parts = "\n".join(self._parts), []
            return data or None
        name, _, value = line.partition(":")
        if name == "data":
            self._parts.append(value.removeprefix(" "))
        return None


async def iterate_data(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The data of each event, up to ``[DONE]`` or the end of the stream."""
    events = EventData()
    async for line in lines:
        if (data := events.feed(line)) is not None:
            if data == DONE:
                return
            yield data


def iterate_data_of(lines: Iterator[str]) -> Iterator[str]:
    """The same, where nothing else is to be done meanwhile."""
    events = EventData()
    for line in lines:
        if (data := events.feed(line)) is not None:
            if data == DONE:
                return
            yield data
