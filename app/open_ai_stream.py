"""A streamed completion as a client reads it: chunks out of the bytes of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from app.open_ai import ErrorDetail, ServerError, one_line
from app.sse import EventDecoder, EventTooLargeError

__all__ = ["AnswerReader", "Choice", "Chunk", "Usage"]

_DONE = b"[DONE]"

Count = Annotated[int, msgspec.Meta(ge=0)]


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Delta(msgspec.Struct):
    """What a message gains."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """What one completion gains: `text` of completions, `delta` of chat completions."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """Text of the answer."""
        return self.text or (self.delta and self.delta.content) or ""

    @property
    def has_tokens(self) -> bool:
        """Tokens came with it, whether they are text or not.

        A special token, or the beginning of a character, is a chunk without text. The chunk that says whose
        turn it is has no token, nor has one that only says why the completion ended.
        """
        if self.content or (self.delta and (self.delta.reasoning_content or self.delta.reasoning)):
            return True
        return self.finish_reason is None and not (self.delta and self.delta.role)


class Chunk(msgspec.Struct):
    """One event."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: ErrorDetail | str | None = None


class AnswerReader:
    """Reads one answer. Feed it what comes, then `close` it.

    Attributes
    ----------
    done : bool
        The event that ends streams came: nothing follows but the end of the connection.
    """

    def __init__(self) -> None:
        self.done = False
        self._events = EventDecoder()
        self._decoder = msgspec.json.Decoder(Chunk)
        self._begun = False
        self._answered = False
        self._finished = False

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """The chunks that `received` ends.

        Raises
        ------
        ServerError
            An event is an error, or not in OpenAI's protocol. Its text is without the server's name.
        """
        if self.done:
            return
        try:
            for data in self._events.feed(received):
                self._begun = True
                if data == _DONE:
                    self.done = True
                    return
                yield self._read(self._decoder.decode(data))
        except (msgspec.MsgspecError, UnicodeError, RecursionError, EventTooLargeError) as error:
            raise ServerError(f"sent what is not OpenAI's protocol: {one_line(str(error))}") from None

    def close(self, content_type: str = "") -> None:
        """The stream has ended.

        Raises
        ------
        ServerError
            The answer has not. `content_type` is what the response said that it is.
        """
        if not self._begun:
            what = one_line(content_type) or "no Content-Type"
            raise ServerError(f"the answer has no events ({what}): expected text/event-stream")
        if not (self._finished or (self.done and self._answered)):
            raise ServerError("the stream ended before the answer did")

    def _read(self, chunk: Chunk) -> Chunk:
        if chunk.error is not None:
            text = chunk.error if isinstance(chunk.error, str) else chunk.error.text()
            raise ServerError(one_line(text) or "an error without a message")
        for choice in chunk.choices or ():
            self._answered = True
            self._finished = self._finished or choice.finish_reason is not None
        return chunk
