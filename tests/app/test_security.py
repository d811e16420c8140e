"""API keys and the rule for debug paths."""

from __future__ import annotations

import base64
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st

from app.http_errors import ApiError
from app.security import AccessRules, is_loopback, read_api_keys
from app.server import ServerSettings, create_app
from app.service import Service
from engine.errors import ConfigurationError


def client_of(service: Service, settings: ServerSettings, host: str = "localhost") -> httpx.AsyncClient:
    debug = APIRouter()

    @debug.get("/debug/alloc")
    async def alloc() -> str:
        return "lines"

    app = create_app(service, settings, debug_routers=[debug])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_any_of_the_keys_opens_and_nothing_else(service: Service) -> None:
    async with client_of(service, ServerSettings(api_keys=("first-key", "second-key"))) as http:
        for path in ("/v1/models", "/debug/alloc", "/openapi.json"):
            for key in ("first-key", "second-key"):
                assert (await http.get(path, headers=bearer(key))).status_code == 200
            for headers in ({}, bearer("third"), bearer(""), {"Authorization": "first-key"}):
                response = await http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"]
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200


async def test_without_a_key_no_body_is_read(service: Service) -> None:
    async with client_of(service, ServerSettings(api_keys=("key",), max_body_bytes=10)) as http:
        response = await http.post("/v1/completions", content=b"x" * 100)
        assert response.status_code == 401
        assert (await http.get("/nowhere")).status_code == 401


async def test_a_browser_may_send_the_key_as_a_password_to_debug_paths_only(service: Service) -> None:
    basic = {"Authorization": "Basic " + base64.b64encode(b"anyone:key").decode()}
    async with client_of(service, ServerSettings(api_keys=("key",))) as http:
        assert (await http.get("/debug/alloc", headers=basic)).status_code == 200
        assert (await http.get("/v1/models", headers=basic)).status_code == 401
        refused = await http.get("/debug/alloc")
        assert refused.headers["www-authenticate"].startswith("Basic")
        broken = await http.get("/debug/alloc", headers={"Authorization": "Basic %%%"})
        assert broken.status_code == 401


async def test_debug_paths_are_closed_to_the_world_without_a_key(service: Service) -> None:
    async with client_of(service, ServerSettings(loopback=False)) as http:
        response = await http.get("/debug/alloc")
        assert response.status_code == 403
        assert "--api-key" in response.json()["error"]["message"]
        assert (await http.get("/v1/models")).status_code == 200
    async with client_of(service, ServerSettings(loopback=False, api_keys=("key",))) as http:
        assert (await http.get("/debug/alloc", headers=bearer("key"))).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("evil.example", 403)],
)
async def test_a_page_whose_name_points_here_reads_no_debug_path(
    service: Service, host: str, status: int
) -> None:
    async with client_of(service, ServerSettings(), host=host) as http:
        assert (await http.get("/debug/alloc")).status_code == status


@given(given_key=st.text(), keys=st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_a_key_opens_exactly_if_it_is_one(given_key: str, keys: list[str]) -> None:
    rules = AccessRules(keys, loopback=True)
    headers = {"authorization": f"Bearer {given_key}"}
    if given_key.strip() in keys:
        rules.check_key(headers)
    else:
        with pytest.raises(ApiError):
            rules.check_key(headers)


def test_keys_come_from_flags_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\nfrom-flag\n")
    environ = {"VTSERVE_API_KEY": "one, two"}
    assert read_api_keys(["from-flag"], file, environ) == ("from-flag", "from-file", "one", "two")
    assert read_api_keys([], None, {}) == ()


def test_unusable_keys_are_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    with pytest.raises(ConfigurationError, match=r"--api-key-file .*found none"):
        read_api_keys([], empty, {})
    with pytest.raises(ConfigurationError, match=r"--api-key-file .*No such file"):
        read_api_keys([], tmp_path / "missing", {})
    empty.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        read_api_keys([], empty, {})
    for key in ("", "two words", "käse", "a\x00b"):
        with pytest.raises(ConfigurationError, match="--api-key: expected"):
            read_api_keys([key], None, {})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("example.com", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
