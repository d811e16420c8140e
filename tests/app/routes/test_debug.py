"""``/debug/alloc`` on a real port, over a trace that another process writes."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from app.failure_store import FailureStore
from app.http_errors import install_error_handlers
from app.routes.debug import debug_router
from app.trace.exporters import EXPORTERS
from app.trace_stream import TraceStream, read_recent
from engine.config import EngineConfig
from engine.failure import FailureReporter
from engine.memory.errors import AllocationRequest, OutOfMemoryError, Why
from engine.memory.ledger import Ledger
from engine.memory.lines import parse_line
from engine.memory.reader import FlightRecorderReader

ROOT = Path(__file__).resolve().parents[3]
CAPACITY = 128
SSE = {"accept": "text/event-stream"}
NDJSON = {"accept": "application/x-ndjson"}


class Writer:
    """A process that writes a trace."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.app.trace_writer", str(path), str(CAPACITY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._expect("ready")

    def do(self, *commands: object) -> None:
        assert self.process.stdin is not None
        for command in commands:
            print(command, file=self.process.stdin, flush=True)
            self._expect("done")

    def _expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Source:
    """What the routes ask."""

    trace_path: Path | None
    failures: FailureStore = field(default_factory=FailureStore)
    known_ledger: dict[str, Any] | None = None
    known_statistics: dict[str, Any] | None = None

    def ledger(self) -> dict[str, Any] | None:
        return self.known_ledger

    def statistics(self) -> dict[str, Any] | None:
        return self.known_statistics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.kill()


@pytest.fixture
def source(path: Path) -> Source:
    return Source(path)


@pytest.fixture
async def http(source: Source) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the routes over a socket."""
    app = FastAPI()
    app.include_router(debug_router(source))
    install_error_handlers(app)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client
    server.should_exit = True
    await anyio.to_thread.run_sync(thread.join)
    listener.close()


def numbers(text: str) -> list[int]:
    """``#N`` of the allocations in `text`."""
    parsed = [parse_line(line) for line in text.splitlines()]
    return [event.sequence for _, event in filter(None, parsed) if event.sequence]


async def test_recent_lines(http: httpx.AsyncClient, writer: Writer) -> None:
    assert (await http.get("/debug/alloc")).text == ""
    writer.do(20, "free", "fail")
    response = await http.get("/debug/alloc")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    assert len(lines) == 22
    assert lines[0].startswith("[host-alloc] #1 size=0.0 MiB live=0.00 GiB free=1.00 GiB tag=weights/model.")
    assert lines[-2].startswith("[host-free] ")
    assert lines[-1].startswith("[host-alloc] FAILED #21 size=1048576.0 MiB ")
    assert numbers((await http.get("/debug/alloc", params={"last": 3})).text)[0] == 20
    assert (await http.get("/debug/alloc", params={"last": 0})).text == ""


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"kind": "failed"}, [21]),
        ({"kind": "free"}, [1]),
        ({"kind": "free,failed"}, [1, 21]),
        ({"kind": ["free", "failed"]}, [1, 21]),
        ({"tag": "kv/"}, [21]),
        ({"tag": "*.layers.1?.mlp", "last": 3}, [17, 18, 19]),
        ({"min_size": "19KiB"}, [19, 20, 21]),
        ({"min_size": "19KiB", "last": 1}, [21]),
        ({"min_size": "19KiB", "kind": "alloc"}, [19, 20]),
    ],
)
async def test_filters(
    http: httpx.AsyncClient, writer: Writer, query: dict[str, Any], expected: list[int]
) -> None:
    writer.do(20, "free", "fail")
    response = await http.get("/debug/alloc", params=query, headers=NDJSON)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line)["sequence"] for line in response.text.splitlines()] == expected


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"last": "-1"}, "last"),
        ({"last": "many"}, "last"),
        ({"min_size": "big"}, "min_size"),
        ({"kind": "weird"}, "kind"),
    ],
)
async def test_bad_parameters_are_named(
    http: httpx.AsyncClient, writer: Writer, query: dict[str, str], field: str
) -> None:
    response = await http.get("/debug/alloc", params=query)
    assert response.status_code in (400, 422)
    assert response.json()["error"]["param"] == field
    response = await http.get("/debug/alloc/export", params={"format": "video"})
    assert response.status_code == 400
    assert "ndjson" in response.json()["error"]["message"]


async def test_without_a_trace_it_says_how_to_get_one(http: httpx.AsyncClient, source: Source) -> None:
    source.trace_path = None
    for path in ("/debug/alloc", "/debug/alloc/export"):
        response = await http.get(path)
        assert response.status_code == 404
        assert "VT_CUDA_ALLOC_TRACE=1" in response.json()["error"]["message"]
        assert "--alloc-trace" in response.json()["error"]["message"]


async def test_an_engine_that_has_not_come_so_far(
    http: httpx.AsyncClient, source: Source, tmp_path: Path
) -> None:
    assert (await http.get("/debug/alloc")).text == ""
    assert (await http.get("/debug/alloc/export")).status_code == 404
    assert (await http.get("/debug/alloc/ledger")).status_code == 404
    assert (await http.get("/debug/alloc/stats")).status_code == 404
    assert str(tmp_path) not in (await http.get("/debug/alloc/export")).text


async def take(lines: AsyncIterator[str], until: Any) -> list[str]:
    """Lines up to one that `until` likes."""
    taken = []
    with anyio.fail_after(20):
        async for line in lines:
            taken.append(line)
            if until(line):
                return taken
    raise AssertionError(f"it ended: {taken}")


async def test_text_follows_on_and_outlives_the_writer(http: httpx.AsyncClient, writer: Writer) -> None:
    writer.do(5)
    async with http.stream("GET", "/debug/alloc", params={"follow": 1, "last": 2}) as response:
        lines = response.aiter_lines()
        assert numbers("\n".join(await take(lines, lambda line: "#5 " in line))) == [4, 5]
        writer.do(2, "fail")
        assert numbers("\n".join(await take(lines, lambda line: "FAILED" in line))) == [6, 7, 8]
        writer.kill()
        assert numbers((await http.get("/debug/alloc")).text) == list(range(1, 9))


def parse_events(lines: list[str]) -> list[dict[str, Any]]:
    """Server-sent events (WHATWG HTML 9.2), comments left out."""
    found: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if not line:
            if current:
                found.append(current)
            current = {}
        elif name:
            value = value.removeprefix(" ")
            current[name] = json.loads(value) if name == "data" else value
    return found


async def test_server_sent_events_resume(http: httpx.AsyncClient, writer: Writer) -> None:
    writer.do(4)
    async with http.stream("GET", "/debug/alloc", headers=SSE) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        taken = await take(lines, lambda line: '"sequence":3' in line)
        await anext(lines)
    seen = parse_events([*taken, ""])
    assert [event["data"]["sequence"] for event in seen] == [1, 2, 3]
    writer.do(3)
    headers = {**SSE, "last-event-id": seen[-1]["id"]}
    async with http.stream("GET", "/debug/alloc", headers=headers) as response:
        lines = response.aiter_lines()
        taken = await take(lines, lambda line: '"sequence":7' in line)
    assert [event["data"]["sequence"] for event in parse_events([*taken, ""])] == [4, 5, 6, 7]


async def test_what_was_overwritten_is_a_gap(http: httpx.AsyncClient, writer: Writer) -> None:
    writer.do(2)
    async with http.stream("GET", "/debug/alloc", headers=SSE) as response:
        taken = await take(response.aiter_lines(), lambda line: '"sequence":2' in line)
    last = parse_events([*taken, ""])[-1]["id"]
    writer.do(CAPACITY + 10)
    headers = {**SSE, "last-event-id": last}
    async with http.stream("GET", "/debug/alloc", headers=headers) as response:
        taken = await take(response.aiter_lines(), lambda line: f'"sequence":{CAPACITY + 12}' in line)
    events = parse_events([*taken, ""])
    assert events[0]["event"] == "gap"
    assert events[0]["data"]["size"] == 10
    assert [event["data"]["sequence"] for event in events[1:]] == list(range(13, CAPACITY + 13))
    headers = {**SSE, "last-event-id": "no such id"}
    async with http.stream("GET", "/debug/alloc", headers=headers) as response:
        taken = await take(response.aiter_lines(), lambda line: '"index":13' in line)
    assert parse_events([*taken, ""])[0]["event"] == "gap"


@pytest.mark.parametrize("traces", [1, 2])
async def test_a_place_that_the_trace_has_not_reached_hides_nothing(
    http: httpx.AsyncClient, writer: Writer, traces: int
) -> None:
    writer.do(2)
    async with http.stream("GET", "/debug/alloc", headers=SSE) as response:
        taken = await take(response.aiter_lines(), lambda line: '"sequence":2' in line)
    created = parse_events([*taken, ""])[-1]["id"].partition("-")[0]
    if traces == 2:
        writer.do("new", 2)
    headers = {**SSE, "last-event-id": f"{created}-1000"}
    with anyio.fail_after(10):
        async with http.stream("GET", "/debug/alloc", headers=headers) as response:
            lines = response.aiter_lines()
            taken = []
            for _ in range(traces):
                taken += await take(lines, lambda line: '"sequence":2' in line)
            writer.do(2)
            taken += await take(lines, lambda line: '"sequence":4' in line)
    gap, *events = parse_events([*taken, ""])
    assert gap["event"] == "gap"
    assert "record 1000" in gap["data"]["text"]
    sequences = [event["data"]["sequence"] for event in events if "event" not in event]
    assert sequences == [*([1, 2] * traces), 3, 4]


async def test_another_engines_trace_goes_on_in_the_same_stream(
    http: httpx.AsyncClient, writer: Writer
) -> None:
    writer.do(2)
    async with http.stream("GET", "/debug/alloc", headers=SSE) as response:
        lines = response.aiter_lines()
        first = await take(lines, lambda line: '"sequence":2' in line)
        writer.do("new", 3)
        taken = await take(lines, lambda line: '"sequence":3' in line)
    events = parse_events([*taken, ""])
    assert [event.get("event") for event in events] == ["engine", None, None, None]
    assert [event["data"]["sequence"] for event in events] == [0, 1, 2, 3]
    # Whoever was away meanwhile reads the rest of the trace before, and then this one.
    headers = {**SSE, "last-event-id": parse_events([*first, ""])[0]["id"]}
    async with http.stream("GET", "/debug/alloc", headers=headers) as response:
        taken = await take(response.aiter_lines(), lambda line: '"sequence":3' in line)
    events = parse_events([*taken, ""])
    assert [event.get("event") for event in events] == [None, "engine", None, None, None]
    assert [event["data"]["sequence"] for event in events] == [2, 0, 1, 2, 3]


async def test_a_hundred_followers_share_one_reading(
    http: httpx.AsyncClient, writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    original = FlightRecorderReader.__init__

    def counted(self: FlightRecorderReader, path: Path | str) -> None:
        opened.append(path)
        original(self, path)

    writer.do(3)
    monkeypatch.setattr(FlightRecorderReader, "__init__", counted)
    stream = TraceStream(Source(path), interval=0.01)
    seen: dict[int, list[int]] = {number: [] for number in range(100)}

    async def follow(number: int) -> None:
        async for piece in stream.follow(None, 10, keep_alive=60):
            assert piece is not None
            seen[number] += [event.sequence for event in piece.events]
            if 9 in seen[number]:
                return

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for number in seen:
                tasks.start_soon(follow, number)
            while not all(seen.values()):
                await anyio.sleep(0.01)
            before = len(opened)
            writer.do(3)
            while not all(6 in found for found in seen.values()):
                await anyio.sleep(0.01)
            writer.do(3)
    assert all(found == list(range(1, 10)) for found in seen.values())
    assert len(opened) == before, "nobody opens the file to read on"


async def test_a_slow_follower_is_told_what_it_lost(writer: Writer, path: Path) -> None:
    stream = TraceStream(Source(path), interval=0.001, keep=16)
    slow = stream.follow(None, 0, keep_alive=60)
    fast = stream.follow(None, 0, keep_alive=60)
    begun = [await anext(slow), await anext(fast)]
    assert [piece.events for piece in begun if piece is not None] == [[], []]
    with anyio.fail_after(20):
        for _ in range(8):
            writer.do(5)
            assert await anext(fast) is not None
        piece = await anext(slow)
    assert piece is not None
    lost, *rest = piece.events
    assert lost.kind.name == "GAP"
    assert lost.size == rest[0].index - 1 > 0
    await slow.aclose()
    await fast.aclose()


async def test_a_request_that_was_running_comes_when_it_is_done(path: Path, tmp_path: Path) -> None:
    """Its place is kept: whoever resumes meanwhile gets it too."""
    from engine.memory.record import EventKind, EventState, TraceHeader
    from engine.memory.recorder import FlightRecorder

    recorder = FlightRecorder.create(path, TraceHeader(capacity=64))

    def begin(sequence: int) -> int:
        asked = (EventKind.ALLOC, sequence, 64, 0, 0, b"host", "weights/a", "a.py:1", ())
        return recorder.begin(*asked)  # type: ignore[arg-type]

    def end(index: int) -> None:
        recorder.end(index, EventState.OK, pointer=64, live=64, free=64, free_is_read=True)

    pending = begin(1)
    end(begin(2))
    piece = read_recent(path, 10)
    assert piece.settled == 0
    assert [str(piece.position(event)).rpartition("-")[2] for event in piece.events] == ["0", "0"]
    stream = TraceStream(Source(path), interval=0.001).follow(None, 10, keep_alive=60)
    first = await anext(stream)
    assert first is not None
    assert [event.sequence for event in first.events] == [2]
    end(pending)
    with anyio.fail_after(10):
        second = await anext(stream)
    assert second is not None
    assert [event.sequence for event in second.events] == [1]
    assert second.settled == 2
    await stream.aclose()
    recorder.close()


async def test_failures_ledger_and_counts(http: httpx.AsyncClient, source: Source, tmp_path: Path) -> None:
    reporter = FailureReporter(tmp_path, EngineConfig(model="m"), output=sys.stderr)
    reporter.on_record = source.failures.add
    request = AllocationRequest(api="host", size=5, tag="kv", site="a.py:1", why=Why.FULL, error="no")
    ids = [
        reporter.report(OutOfMemoryError(request), doing=f"step {number}", fatal=False).id
        for number in range(2)
    ]
    listed = (await http.get("/debug/alloc/failures")).json()["failures"]
    assert [entry["id"] for entry in listed] == ids[::-1]
    assert listed[0]["why"] == "full"
    record = (await http.get(f"/debug/alloc/failures/{ids[0]}")).json()
    assert record["doing"] == "step 0"
    assert record["allocation"]["size"] == 5
    for missing in ("nothing", "..%2F..%2Fetc%2Fpasswd", ids[0] + "x"):
        assert (await http.get(f"/debug/alloc/failures/{missing}")).status_code == 404
    known = Ledger(total=5 << 20, free=1 << 20, tags={"kv/k": 3 << 20}, rounding=1 << 20, moment="serving")
    source.known_ledger = known.to_dict()
    source.known_statistics = {"total": {"allocations": 1}}
    assert (await http.get("/debug/alloc/ledger")).json() == known.to_dict()
    table = await http.get("/debug/alloc/ledger", headers={"Accept": "text/plain"})
    assert table.headers["content-type"].startswith("text/plain")
    assert table.text == known.render() + "\n"
    assert (await http.get("/debug/alloc/stats")).json() == {"total": {"allocations": 1}}


async def test_export_is_all_that_is_held(http: httpx.AsyncClient, writer: Writer) -> None:
    writer.do(CAPACITY + 5)
    response = await http.get("/debug/alloc/export", params={"format": "ndjson"})
    assert 'filename="alloc-trace.' in response.headers["content-disposition"]
    header, lost, *records = [json.loads(line) for line in response.text.splitlines()]
    assert (header["kind"], header["total"]) == ("header", 1 << 30)
    assert (lost["kind"], lost["size"]) == ("gap", 5)
    assert [record["index"] for record in records] == list(range(6, CAPACITY + 6))
    assert records[0]["tag"] == "weights/model.layers.6.mlp"
    assert records[0]["size"] == 6 * 1024


@pytest.mark.parametrize("format", sorted(EXPORTERS))
async def test_every_format_is_that_of_the_command_line(
    http: httpx.AsyncClient, writer: Writer, path: Path, format: str
) -> None:
    writer.do(5, "free", "fail")
    response = await http.get("/debug/alloc/export", params={"format": format})
    if response.status_code == 501:
        pytest.skip(response.json()["error"]["message"])
    assert response.headers["content-type"].startswith(EXPORTERS[format].media_type)
    out = io.BytesIO()
    with FlightRecorderReader(path) as reader:
        EXPORTERS[format].export(reader.read().events(), reader.header, out)
    # gzip's header may have the time in it.
    assert len(response.content) == pytest.approx(len(out.getvalue()), abs=4)
    assert response.content[:4] == out.getvalue()[:4]
