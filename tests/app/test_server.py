"""What stands before every route: body limits, the shape of errors, clients that go, ends of streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.responses import StreamingResponse

from app.body_limit import BodyLimitMiddleware
from app.closing import OpenStreams
from app.http_errors import public_text
from app.server import ServerSettings, create_app
from app.service import Service
from tests.app.local_engine import LocalEngine

JSON = {"Content-Type": "application/json"}


async def test_a_body_over_the_limit_is_413(http: httpx.AsyncClient) -> None:
    body = json.dumps({"prompt": "x" * (1 << 16)}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    declared = await http.post("/v1/completions", content=body, headers=JSON)
    chunked = await http.post("/v1/completions", content=pieces(), headers=JSON)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert "--max-body-size" in response.json()["error"]["message"]


async def test_a_body_at_the_limit_passes(http: httpx.AsyncClient) -> None:
    body = json.dumps({"prompt": ""}).encode()
    body = json.dumps({"prompt": "x" * ((1 << 16) - len(body))}).encode()
    assert len(body) == 1 << 16
    response = await http.post("/tokenize", content=body, headers=JSON)
    assert response.status_code == 200


async def test_a_body_that_does_not_come_is_408() -> None:
    async def unreachable(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    async def silent() -> Any:
        await anyio.sleep_forever()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await BodyLimitMiddleware(unreachable, 10, seconds=0.01)(scope, silent, send)
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[1]", JSON, 422),
        (b"", JSON, 422),
        (b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 422),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", JSON, 400),
        (b"[" * 60_000, JSON, 400),
        (b'{"prompt": "x", "temperature": NaN}', JSON, 422),
        (b'{"prompt": "x", "temperature": 1e999}', JSON, 422),
        (b"\xff\xfe", JSON, 400),
    ],
)
async def test_what_is_no_request_is_said_so(
    http: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int
) -> None:
    response = await http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "a number of over 4300 digits"),
        (b"[" * 60_000, "nested too deep"),
        (b'{"prompt": "\xff"}', "not UTF-8: invalid start byte at byte 12"),
    ],
)
async def test_a_body_that_cannot_be_parsed_says_why(
    http: httpx.AsyncClient, content: bytes, expected: str
) -> None:
    response = await http.post("/v1/completions", content=content, headers=JSON)
    assert (response.status_code, response.json()["error"]["message"]) == (400, f"the body: {expected}")


async def test_no_such_path_and_method(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v2/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    assert "/v2/nothing" not in missing.json()["error"]["message"]
    wrong = await http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"


async def test_a_client_that_goes_aborts_its_request(app: FastAPI, engine: LocalEngine) -> None:
    for stream in (False, True):
        for prompt in ([5, 6], [[5, 6], [7]]):
            body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": stream}
            gone = anyio.Event()
            inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

            async def receive(inbox: list[Any] = inbox, gone: anyio.Event = gone) -> Any:
                if inbox:
                    return inbox.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                pass

            scope = {
                **{"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""},
                **{"headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"}},
                **{"http_version": "1.1", "raw_path": b"/v1/completions", "scheme": "http"},
                **{"server": ("localhost", 80), "client": ("localhost", 1), "root_path": ""},
            }
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(app, scope, receive, send)
                while not engine.used_blocks:
                    await anyio.sleep(0)
                gone.set()
            assert not engine.unfinished
            assert engine.used_blocks == 0


@pytest.mark.parametrize("begun", [False, True])
async def test_endless_responses_end_in_order_when_the_server_stops(service: Service, begun: bool) -> None:
    streams, router, waiting = OpenStreams(), APIRouter(), anyio.Event()

    @router.get("/debug/alloc")
    async def follow() -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            if begun:
                yield "line\n"
            waiting.set()
            await anyio.sleep_forever()

        return StreamingResponse(lines(), media_type="text/plain")

    app = create_app(service, ServerSettings(), debug_routers=[router], streams=streams)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await waiting.wait()
                streams.close()

            tasks.start_soon(stop)
            response = await http.get("/debug/alloc")
        assert response.text == ("line\n" if begun else "")
        late = await http.get("/debug/alloc")
        assert late.text in ("", "line\n")


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("failure record: /home/me/.local/state/F.json", "failure record: F.json"),
        ("site=/usr/lib/python3/x.py:12", "site=x.py:12"),
        ("~/models/m: no such file", "m: no such file"),
        ("site=engine/kv_cache.py:61 1/2 a/b", "site=engine/kv_cache.py:61 1/2 a/b"),
        ("http://host/v1/models", "http://host/v1/models"),
        ("two\nlines \ud800", "two lines \\ud800"),
    ],
)
def test_files_lose_their_directories(text: str, public: str) -> None:
    assert public_text(text) == public
