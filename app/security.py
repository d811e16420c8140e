"""Who may ask what: API keys, and the rule for debug paths.

A server without keys is open to whoever can reach it, so it listens on loopback unless told otherwise. Debug
paths tell of memory, flags and failures: they need the key where there is one, and are closed where there is
none but the server can be reached from elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http_errors import ApiError
from engine.errors import ConfigurationError

__all__ = ["AccessMiddleware", "AccessRules", "is_loopback", "read_api_keys"]

_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""what load balancers, container engines and Prometheus ask without a key"""
_DEBUG_PREFIX = "/debug"
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def read_api_keys(keys: Sequence[str], file: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """All keys that ``--api-key``, ``--api-key-file`` and ``VTSERVE_API_KEY`` give, each once.

    The file has a key a line; empty lines and lines that begin with ``#`` do not count. The variable has one
    or several with commas between.

    Raises
    ------
    ConfigurationError
        The file cannot be read or has no key, or a key has characters that no header carries.
    """
    found: list[tuple[str, str]] = [("--api-key", key) for key in keys]
    if file is not None:
        found += [("--api-key-file", key) for key in _keys_of_file(file)]
    variable = environ.get("VTSERVE_API_KEY", "")
    found += [("VTSERVE_API_KEY", key.strip()) for key in variable.split(",") if key.strip()]
    for source, key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigurationError(f"{source}: expected a key of visible ASCII characters")
    return tuple(dict.fromkeys(key for _, key in found))


def _keys_of_file(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigurationError(f"--api-key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"--api-key-file {file}: is not UTF-8 text") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigurationError(f"--api-key-file {file}: expected a key a line, found none")
    return keys


def is_loopback(host: str) -> bool:
    """Nobody outside this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessRules:
    """Decides who may ask. Keys are kept and compared as digests, each with all, in constant time."""

    def __init__(self, keys: Iterable[str], *, loopback: bool) -> None:
        self._digests = [_digest(key) for key in keys]
        self._loopback = loopback

    def check_key(self, headers: Mapping[str, str], *, basic: bool = False) -> None:
        """Refuse whoever has no key. `basic`: a browser may send it as the password of basic authentication.

        Raises
        ------
        ApiError
            401: there is no key, or a wrong one.
        """
        if not self._digests:
            return
        given = _digest(_key_of(headers, basic) or "")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if any(matches):
            return
        challenge = 'Basic realm="vtserve", charset="UTF-8"' if basic else "Bearer"
        raise ApiError(
            401,
            "expected an API key: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": challenge},
        )

    def check_debug(self, headers: Mapping[str, str]) -> None:
        """The rule for debug paths.

        Raises
        ------
        ApiError
            401: a key is needed. 403: the server can be reached from elsewhere, and has no key to ask for.
        """
        if self._digests:
            self.check_key(headers, basic=True)
        elif not self._loopback:
            raise ApiError(
                403,
                "debug paths are closed: the server listens on more than loopback and has no API key; "
                "start it with --api-key",
                code="debug_closed",
            )
        elif not _is_local_name(headers.get("host", "")):
            # A page from elsewhere whose name resolves to this machine (DNS rebinding) carries its own name.
            raise ApiError(
                403, "debug paths without an API key answer to localhost only", code="debug_closed"
            )


class AccessMiddleware:
    """Refuses requests without a key before their bodies are read. Health and metrics stay open."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            debug = scope["path"] == _DEBUG_PREFIX or scope["path"].startswith(_DEBUG_PREFIX + "/")
            try:
                if debug:
                    self._rules.check_debug(Headers(scope=scope))
                else:
                    self._rules.check_key(Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(headers: Mapping[str, str], basic: bool) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _is_local_name(host: str) -> bool:
    """`host` is a Host header: a name or address, perhaps with a port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower() in _LOCAL_NAMES
