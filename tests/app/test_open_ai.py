"""What a client says of a server, and what it sends."""

from __future__ import annotations

import json

import httpx
import pytest

from app.open_ai import (
    ServerError,
    client_key,
    client_options,
    error_line,
    first_model,
    one_line,
    server_url,
    tokenize,
    transport_line,
)
from engine.errors import ConfigurationError
from tests.app.hostile_server import hostile_server, response


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" https://example.org/api/v1/ ", "https://example.org/api"),
        ("http://[::1]:9/v1", "http://[::1]:9"),
    ],
)
def test_urls(given: str, url: str) -> None:
    assert server_url("--url", given) == url


@pytest.mark.parametrize(
    "given",
    ["", "host:80", "example", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a/?q", "\x1b"],
)  # fmt: skip
def test_a_url_that_is_none_is_named(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--url .*expected a URL") as caught:
        server_url("--url", given)
    assert str(caught.value).isprintable()


def test_keys() -> None:
    environ = {"VTSERVE_API_KEY": " , one , two"}
    assert client_key(None, environ) == "one"
    assert client_key("three", environ) == "three"
    assert client_key(None, {}) is None
    for given, name in (("a b", "--api-key"), ("schlüssel", "--api-key"), (None, "VTSERVE_API_KEY")):
        with pytest.raises(ConfigurationError, match=f"^{name}: "):
            client_key(given, {"VTSERVE_API_KEY": "a\nb"})


def test_proxies_are_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with hostile_server(b"") as server:
        assert first_model(server.url, None) == "m"
        assert first_model(server.url.replace("127.0.0.1", "localhost"), None) == "m"
    with pytest.raises(ServerError):
        first_model("http://example.invalid", None, timeout=5)


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (400, b'{"error": {"message": "too\\nlong", "code": 3}}', "400: too long"),
        (400, b'{"error": "short"}', "400: short"),
        (503, b'{"error": {"message": "it died", "failure_id": "x-1"}}', "503: it died; failure record: x-1"),
        (503, b'{"error": {"message": "record: x-1", "failure_id": "x-1"}}', "503: record: x-1"),
        (422, b'{"detail": "no"}', '422: {"detail": "no"}'),
        (502, b"<html>\x1b[2J", "502: <html>?[2J"),
        (404, b"", "404: Not Found"),
        (799, b"", "799"),
        (500, b"[" * 100_000, "500: " + "[" * 499 + "…"),
        (500, b"\xff" * 9, "500: " + "\ufffd" * 9),
    ],
)
def test_errors_are_a_line(status: int, body: bytes, line: str) -> None:
    assert error_line(status, body) == line


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (response(b"[]"), "lists no model"),
        (response(b'{"data": []}'), "lists no model"),
        (response(b'{"data": [{"id": 5}]}'), "lists no model"),
        (response(b"[" * 100_000), "lists no model"),
        (response(b"\xff\xfe"), "lists no model"),
        (response(b'{"error": {"message": "no key"}}', status="401 Unauthorized"), "401: no key"),
        (response(b"x", status="302 Found", head="Location: /v1/models\r\n"), "302: x"),
        (response(b"not gzip", head="Content-Encoding: gzip\r\n"), "incorrect header check"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "peer closed connection"),
        (b"garbage\r\n\r\n", "illegal status line"),
        (b"", "disconnected"),
    ],
)
def test_a_server_that_lists_no_model(models: bytes, expected: str) -> None:
    with hostile_server(b"", models=models) as server:
        with pytest.raises(ServerError, match=expected) as caught:
            first_model(server.url, None, timeout=10)
        assert str(caught.value).startswith(f"{server.url}: ")
        assert str(caught.value).isprintable()


def test_a_list_without_end_is_given_up() -> None:
    models = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (17 << 20)
    with hostile_server(b"", models=models) as server, pytest.raises(ServerError, match="more than 16 MiB"):
        first_model(server.url, None)


def test_token_ids() -> None:
    with hostile_server(response(b'{"count": 2, "tokens": [5, 6]}')) as server:
        assert tokenize(server.url, "key", "m", "a b") == [5, 6]
        path, body = server.requests[0]
    assert path == "/tokenize"
    assert json.loads(body) == {"model": "m", "prompt": "a b", "add_special_tokens": False}
    for answer in (response(b"", status="404 Not Found"), response(b"{}"), response(b'{"tokens": "x"}')):
        with hostile_server(answer) as server:
            assert tokenize(server.url, None, "m", "a b") is None


def test_transport_errors_are_a_line() -> None:
    assert transport_line(httpx.ConnectTimeout(""), 600) == "no connection within 10 s"
    assert transport_line(httpx.ReadTimeout(""), 0.5) == "no byte for 0.5 s"
    assert transport_line(httpx.ReadError(""), 1) == "the connection broke off (ReadError)"
    assert transport_line(httpx.ProxyError(""), 1) == "ProxyError"
    assert transport_line(httpx.ConnectError("no\nroute"), 1) == "no route"
    assert one_line("a" * 600) == "a" * 499 + "…"


def test_a_key_is_sent_and_compression_is_not_asked_for() -> None:
    with httpx.Client(**client_options("http://a", "secret", 3)) as client:
        request = client.build_request("GET", "/v1/models")
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["accept-encoding"] == "identity"
