"""Ends responses that have no end of their own, so that they do not hold up a server that stops."""

from __future__ import annotations

from contextlib import suppress

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ClosingMiddleware", "OpenStreams"]

_ENDLESS_PREFIX = "/debug/"


class OpenStreams:
    """Responses under way that may be ended at any time: those that follow the trace."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._closed = False

    def close(self) -> None:
        """End them all, and each that begins from now on. Idempotent."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()

    def open(self) -> anyio.CancelScope:
        """A scope for one more; give it to `forget` at its end."""
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        if self._closed:
            scope.cancel()
        return scope

    def forget(self, scope: anyio.CancelScope) -> None:
        self._scopes.discard(scope)


class ClosingMiddleware:
    """Puts what is asked for under ``/debug`` among the open streams, and ends it in order."""

    def __init__(self, app: ASGIApp, streams: OpenStreams) -> None:
        self._app = app
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_ENDLESS_PREFIX):
            await self._app(scope, receive, send)
            return
        started = complete = False

        async def watched(message: Message) -> None:
            nonlocal started, complete
            started = started or message["type"] == "http.response.start"
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        cancel_scope = self._streams.open()
        try:
            with cancel_scope:
                await self._app(scope, receive, watched)
        finally:
            self._streams.forget(cancel_scope)
        if cancel_scope.cancelled_caught and not complete:
            with suppress(OSError):
                if not started:
                    await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
