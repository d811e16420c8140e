"""A conversation with a served model: what was said so far, and answers as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from app.open_ai import ServerError, what_went_wrong
from app.sse import iterate_data_of

__all__ = ["Conversation"]


class Conversation:
    """Turns with one model. Close it, or use it in a ``with``.

    Attributes
    ----------
    model : str
    messages : list of dict
        What was said, in OpenAI's form.
    answered : bool
        Whether an answer was ever whole.
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
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self._timeout = timeout
        self._half = ""
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def say(self, text: str) -> Iterator[str]:
        """Say `text`; the pieces of the answer, as they come. Without a whole answer it was not said.

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
        except ServerError:
            self.messages.pop()
            raise
        self._keep()
        self.answered = True

    def keep_half(self) -> None:
        """The answer was cut short by whoever reads it: what there was of it stays in the conversation."""
        if self.messages and self.messages[-1]["role"] == "user":
            self._keep()

    def _keep(self) -> None:
        self.messages.append({"role": "assistant", "content": self._half})

    def _answer(self, asked: dict[str, Any]) -> Iterator[str]:
        finished = False
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServerError(f"{self._url}: {what_went_wrong(response)}")
                for data in iterate_data_of(response.iter_lines()):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ServerError(f"{self._url}: {chunk['error']['message']}")
                    for choice in chunk["choices"]:
                        finished = finished or choice["finish_reason"] is not None
                        if piece := choice["delta"].get("content"):
                            self._half += piece
                            yield piece
        except httpx.TimeoutException:
            raise ServerError(f"{self._url}: no byte for {self._timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{self._url}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ServerError(f"{self._url}: sent what is not OpenAI's protocol") from None
        if not finished:
            raise ServerError(f"{self._url}: the stream ended before the answer did")

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
