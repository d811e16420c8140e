"""What the responses of both completions and chat completions have in common."""

from __future__ import annotations

import logging
from typing import Any, Literal

from starlette.responses import Response

from app.http_errors import ApiError, api_error
from app.streaming import server_sent_event
from engine.messages import FinishReason
from engine.outputs import CompletionDelta, CompletionOutput

__all__ = ["DONE", "NO_CLIENT", "STREAMED", "error_event", "finish_reason"]

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""ends OpenAI's streams"""

NO_CLIENT = Response(status_code=499)
"""for a client that has gone: nobody sees it"""

STREAMED: dict[str, Any] = {
    "text/event-stream": {"schema": {"type": "string", "description": 'Chunks, with "stream": true.'}}
}
"""the other content of a response in OpenAPI"""


def finish_reason(piece: CompletionDelta | CompletionOutput) -> Literal["stop", "length"] | None:
    """OpenAI's word for why it ended."""
    match piece.finish_reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
    return None


def error_event(error: Exception) -> bytes:
    """The last events of a stream that failed."""
    told = api_error(error)
    if told is None:
        _log.error("a stream failed", exc_info=error)
        told = ApiError(500, "internal error; the server's log has it")
    return server_sent_event(told.body()) + DONE
