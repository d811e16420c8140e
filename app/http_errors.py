"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

======  ====================================================================================
status  meaning
======  ====================================================================================
400     the body is no JSON, or a field has a value that cannot be served
401     no API key, or a wrong one
403     the path is closed to whoever can reach this server
404     no such path, model or record
405     the path has no such method
408     the body did not arrive in time
413     the body is larger than allowed
422     a field is missing, unknown, or of the wrong type
429     as many requests wait as may; ``Retry-After`` says when to ask again
500     a fault of ours
503     the engine is not there; the message names the failure record, if there is one
======  ====================================================================================
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.serving_engine import QueueFullError
from engine.errors import EngineDeadError, RequestError, VtserveError

__all__ = [
    "ApiError",
    "JsonResponse",
    "api_error",
    "install_error_handlers",
    "public_text",
    "unavailable",
]

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_RETRY_SECONDS = 5


class ApiError(Exception):
    """What a client did, or what became of its request.

    Parameters
    ----------
    param
        The request's field that is at fault.
    code
        A word for programs: ``model_not_found``, ``context_length_exceeded``.
    failure_id
        The failure record that tells more; a field of the error, beside OpenAI's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        failure_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.failure_id = failure_id
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that a client reads."""
        otherwise = "invalid_request_error" if self.status < 500 else "server_error"
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, otherwise),
            "param": self.param,
            "code": self.code,
        }
        if self.failure_id is not None:
            error["failure_id"] = self.failure_id
        return {"error": error}

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), self.status, headers=self.headers)


class JsonResponse(Response):
    """JSON, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def api_error(error: Exception) -> ApiError | None:
    """How `error` is told to a client; None for a fault of ours."""
    match error:
        case ApiError():
            return error
        case RequestError():
            over_long = error.field == "prompt" and "--max-model-len" in str(error)
            code = "context_length_exceeded" if over_long else None
            return ApiError(400, public_text(str(error)), param=error.field, code=code)
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return ApiError(429, public_text(str(error)), code="queue_full", headers=headers)
        case EngineDeadError():
            return unavailable("the engine stopped", error.failure_id)
        case VtserveError():
            return ApiError(500, public_text(str(error)))
    return None


def unavailable(what: str, failure_id: str | None = None) -> ApiError:
    """503: the engine is not there. `what` says why, without the failure record."""
    record = "" if failure_id is None else f"; failure record: {failure_id}"
    return ApiError(
        503,
        what + record,
        code="engine_unavailable",
        failure_id=failure_id,
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


_PATH = re.compile(r"(?<![\w.~:/])~?/(?:[^\s/:;,()'\"]+/)+(?=[^\s/:;,()'\"])")


def public_text(text: str) -> str:
    """`text` as one line of Unicode in which files have lost their directories."""
    printable = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return _PATH.sub("", printable)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of `app` in OpenAI's shape."""

    async def known(request: Request, error: Exception) -> Response:
        told = api_error(error)
        assert told is not None
        return told.response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if message == HTTPStatus(error.status_code).phrase:
            message = f"{request.method} {request.url.path}: {message.lower()}"
        elif error.status_code == 400 and (unread := _unread_body(error.__cause__)):
            message = f"the body: {unread}"
        headers = error.headers or {}
        return ApiError(error.status_code, public_text(message), headers=headers).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error.errors()).response()

    async def unknown(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error; the server's log has it").response()

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(VtserveError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unknown)


def _unread_body(cause: BaseException | None) -> str | None:
    """Why FastAPI could not parse a body, for which it has one sentence. None: that is not what happened."""
    match cause:
        case RecursionError():
            return "nested too deep"
        case UnicodeDecodeError():
            return f"not {cause.encoding.upper()}: {cause.reason} at byte {cause.start}"
        case ValueError():  # all that is left to json
            return f"a number of over {sys.get_int_max_str_digits()} digits"
    return None


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of what is wrong with a body: 400 if it is no JSON, else 422 with the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {public_text(str(first['ctx']['error']))}")
    # A value that fits no member of a union has an error for each: the ones that looked deepest tell most.
    same = [error for error in errors if error["loc"][:2] == first["loc"][:2]]
    depth = max(len(error["loc"]) for error in same)
    same = [error for error in same if len(error["loc"]) == depth]
    field = _field(same[0]["loc"])
    if same[0]["type"] == "extra_forbidden":
        return ApiError(422, f"{field}: there is no such field", param=field, code="unknown_field")
    messages = dict.fromkeys(public_text(error["msg"].removeprefix("Value error, ")) for error in same)
    message = ", or ".join(text[:1].lower() + text[1:] for text in messages)
    if not field:
        # What is missing most often is the header.
        return ApiError(422, f"the body: {message}; expected a JSON object sent as application/json")
    return ApiError(422, f"{field}: {message}", param=field)


def _field(location: Sequence[Any]) -> str:
    """``("body", "messages", 0, "content", "str")`` as ``messages[0].content``."""
    text = ""
    for place, part in enumerate(location[1:], start=2):
        if isinstance(part, int):
            text += f"[{part}]"
        elif place == len(location) and not text:
            text = public_text(part)
        elif part.isidentifier() and not part[0].isupper() and not (text and part in _VARIANTS):
            text += f".{part}" if text else part
    return text


_VARIANTS = frozenset({"str", "int", "float", "bool", "list", "dict"})
"""how pydantic calls the members of a union that are no models; those have capitals"""
