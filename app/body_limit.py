"""Bodies are read whole before anything looks at them, up to a size and a time."""

from __future__ import annotations

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http_errors import ApiError
from engine.memory.errors import describe_bytes

__all__ = ["BodyLimitMiddleware"]

_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class BodyLimitMiddleware:
    """Answers 413 to a body over `limit` bytes, declared or not, and 408 to one that takes over `seconds`."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float = 60.0) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client left."""
        declared = Headers(scope=scope).get("content-length", "0")
        # Nothing is known of the rest, so the connection ends with the answer.
        close = {"Connection": "close"}
        too_large = ApiError(
            413, f"the body is over {describe_bytes(self._limit)} (--max-body-size)", headers=close
        )
        if declared.isdecimal() and len(declared) < 20 and int(declared) > self._limit:
            raise too_large
        body = bytearray()
        with anyio.move_on_after(self._seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > self._limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
        raise ApiError(408, f"the body did not arrive within {self._seconds:g} s", headers=close)
