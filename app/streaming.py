"""Responses that end when their client goes, and server-sent events (WHATWG HTML, 9.2)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["Emit", "EventStream", "server_sent_event", "unless_disconnected"]

Emit = Callable[[bytes], Awaitable[None]]
"""Sends a piece of the body"""

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
    """The outcome of `work`, which is cancelled when the client goes; then None.

    The request's body must have been read.
    """
    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            result = await work()
        except Exception as error:  # raised below: out here it would come in an ExceptionGroup
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def server_sent_event(data: Any) -> bytes:
    """An event that carries `data` as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Server-sent events. The response begins with the first of them.

    Until then an exception is answered with a status, as for any other response; afterwards with an event.

    Parameters
    ----------
    produce
        Sends the events. Cancelled when the client goes.
    on_error
        The last event after an exception.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        on_error: Callable[[Exception], bytes],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._produce = produce
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def emit(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def work() -> None:
            try:
                await self._produce(emit)
            except Exception as error:
                if not started:
                    raise
                await emit(self._on_error(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await unless_disconnected(receive, work)
