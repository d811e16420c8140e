"""What a client of a server that speaks OpenAI's protocol needs beside its requests.

Whatever such a server does (is not there, refuses, sends garbage, breaks off) is a `ServerError` of one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from engine.errors import ConfigurationError, VtserveError

__all__ = [
    "MAX_ERROR_BYTES",
    "ServerError",
    "client_key",
    "client_options",
    "error_line",
    "first_model",
    "is_chat",
    "one_line",
    "server_url",
    "tokenize",
    "transport_line",
    "what_went_wrong",
]

MAX_ERROR_BYTES = 1 << 16
"""read of the body of an error"""
_MAX_BODY_BYTES = 16 << 20
_MAX_LINE = 500
_MAX_PORT = 65_535
_CONNECT_SECONDS = 10.0
_SECONDS = 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class ServerError(VtserveError):
    """The server is not there, refused, or does not speak the protocol. One line."""


def server_url(flag: str, url: str) -> str:
    """`url` as requests are put behind it: without ``/v1`` and slashes at its end.

    Raises
    ------
    ConfigurationError
        It is no URL of a server. Names `flag`.
    """
    expected = f"{flag} {one_line(url)}: expected a URL like http://127.0.0.1:8000"
    try:
        parsed = httpx.URL(url.strip())
    except (httpx.InvalidURL, UnicodeError):
        raise ConfigurationError(expected) from None
    sound = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) <= _MAX_PORT
    if not sound or parsed.query or parsed.fragment or len(url.split()) != 1:
        raise ConfigurationError(expected)
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def client_key(given: str | None, environ: Mapping[str, str]) -> str | None:
    """``--api-key``, else the first key of ``VTSERVE_API_KEY``, which may hold several for a server.

    Raises
    ------
    ConfigurationError
        It has characters that no header carries.
    """
    keys = [key.strip() for key in environ.get("VTSERVE_API_KEY", "").split(",")]
    key = given or next(filter(None, keys), None)
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        name = "--api-key" if given else "VTSERVE_API_KEY"
        raise ConfigurationError(f"{name}: expected a key of visible ASCII characters")
    return key


def client_options(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    """Arguments of ``httpx.Client`` and ``AsyncClient``. `timeout`: seconds without a byte.

    Nothing is asked to be compressed: an encoder would hold tokens back. A proxy of the environment is not
    asked for this very machine.
    """
    headers = {"Accept-Encoding": "identity"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS)),
        "mounts": {f"all://{host}": None for host in _LOOPBACK},
    }


def is_chat(endpoint: str) -> bool:
    """The path takes conversations, not prompts."""
    return endpoint.rstrip("/").endswith("/chat/completions")


def first_model(url: str, key: str | None, timeout: float = _SECONDS) -> str:
    """The name of the first model that the server lists. `timeout`: seconds without a byte.

    Raises
    ------
    ServerError
        It does not answer, refuses, or has none.
    """
    status, body = _fetch(url, key, timeout, "GET", "/v1/models")
    if status != 200:
        raise ServerError(f"{url}: {error_line(status, body)}")
    try:
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (msgspec.MsgspecError, UnicodeError, RecursionError, IndexError):
        raise ServerError(f"{url}: /v1/models lists no model: is it OpenAI's protocol?") from None


def tokenize(url: str, key: str | None, model: str, text: str, timeout: float = _SECONDS) -> list[int] | None:
    """Token ids of `text`, from ``/tokenize`` as vLLM and vtserve have it; None where there is no such path.

    Raises
    ------
    ServerError
        The server does not answer.
    """
    asked = {"model": model, "prompt": text, "add_special_tokens": False}
    status, body = _fetch(url, key, timeout, "POST", "/tokenize", asked)
    try:
        return msgspec.json.decode(body, type=_Tokens).tokens if status == 200 else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def error_line(status: int, body: bytes) -> str:
    """Status and message of a response that is an error, in one line."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
        message = error.text() if isinstance(error, ErrorDetail) else error
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        message = body[: 4 * _MAX_LINE].decode(errors="replace")
    return f"{status}: {one_line(message) or httpx.codes.get_reason_phrase(status)}".removesuffix(": ")


def what_went_wrong(response: httpx.Response) -> str:
    """`error_line` of a response whose body was read."""
    return error_line(response.status_code, response.content)


def transport_line(error: Exception, timeout: float) -> str:
    """What `error` of httpx says of a connection, in one line. `timeout`: seconds without a byte."""
    match error:
        case httpx.ConnectTimeout():
            return f"no connection within {min(timeout, _CONNECT_SECONDS):g} s"
        case httpx.TimeoutException():
            return f"no byte for {timeout:g} s"
        case httpx.NetworkError() if not str(error):
            return f"the connection broke off ({type(error).__name__})"
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """`text` without line ends and control characters, which would steer a terminal; its end is cut off."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


class ErrorDetail(msgspec.Struct):
    """What went wrong, in OpenAI's shape, and vtserve's failure record."""

    message: str = ""
    failure_id: str | None = None

    def text(self) -> str:
        """The message; names the failure record in any case."""
        if self.failure_id and self.failure_id not in self.message:
            return f"{self.message}; failure record: {self.failure_id}"
        return self.message


class _ErrorBody(msgspec.Struct):
    error: ErrorDetail | str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _fetch(
    url: str, key: str | None, timeout: float, method: str, path: str, json: object = None
) -> tuple[int, bytes]:
    """Status and body, of which there may be only so much."""
    body = b""
    try:
        with (
            httpx.Client(**client_options(url, key, timeout)) as client,
            client.stream(method, path, json=json) as response,
        ):
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _MAX_BODY_BYTES:
                    raise ServerError(f"{url}: {path}: more than {_MAX_BODY_BYTES >> 20} MiB")
            return response.status_code, body
    except httpx.HTTPError as error:
        raise ServerError(f"{url}: {transport_line(error, timeout)}") from None
