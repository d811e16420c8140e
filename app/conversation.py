"""A conversation with a served model: what was said so far, and answers as they come."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from app.open_ai import MAX_ERROR_BYTES, ServerError, client_options, error_line, transport_line
from app.open_ai_stream import AnswerReader

__all__ = ["Conversation"]


class Conversation:
    """Turns with one model. Close it, or use it in a ``with``.

    Attributes
    ----------
    model : str
    messages : list of dict
        What was said, in OpenAI's form.
    answered : bool
        An answer was whole once.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.model = model
        self.answered = False
        self._system = system
        self._options = {
            name: value
            for name, value in {"max_completion_tokens": max_tokens, "temperature": temperature}.items()
            if value is not None
        }
        self._url = url
        self._client = httpx.Client(**client_options(url, api_key, timeout))
        self._timeout = timeout
        self._half = ""
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def say(self, text: str) -> Generator[str, None, None]:
        """Say `text`; the pieces of the answer, as they come. Without a whole answer it was not said.

        Close the iterator to end the answer; `keep_half` then keeps what there was of it.

        Raises
        ------
        ServerError
            The server is not there, refuses, or breaks off.
        """
        self._half = ""
        self.messages.append({"role": "user", "content": text})
        asked = {"model": self.model, "messages": self.messages, "stream": True, **self._options}
        try:
            yield from self._answer(asked)
        except ServerError as error:
            self.messages.pop()
            raise ServerError(f"{self._url}: {error}") from None
        self._keep()
        self.answered = True

    def keep_half(self) -> None:
        """The answer was cut short by whoever reads it: what there was of it stays in the conversation.

        If there was nothing, nothing was said either.
        """
        if self.messages and self.messages[-1]["role"] == "user":
            if self._half:
                self._keep()
            else:
                self.messages.pop()

    def _keep(self) -> None:
        self.messages.append({"role": "assistant", "content": self._half})

    def _answer(self, asked: dict[str, Any]) -> Iterator[str]:
        """Raises ServerError, without the server's name."""
        reader = AnswerReader()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.status_code != 200:
                    raise ServerError(error_line(response.status_code, _beginning(response)))
                for received in response.iter_bytes():
                    for chunk in reader.feed(received):
                        for choice in chunk.choices or ():
                            if choice.content:
                                self._half += choice.content
                                yield choice.content
                    if reader.done:
                        break
                reader.close(response.headers.get("content-type", ""))
        except httpx.HTTPError as error:
            raise ServerError(transport_line(error, self._timeout)) from None

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _beginning(response: httpx.Response) -> bytes:
    """As much of the body of an error as is read of one."""
    body = b""
    for piece in response.iter_bytes():
        body += piece
        if len(body) >= MAX_ERROR_BYTES:
            break
    return body
