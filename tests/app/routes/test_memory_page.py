"""The memory page in a browser, over a real server with a real engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import faulty_engine
from tests.app.browser import open_browser

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["--device", "cpu", "--threads", "1", "--kv-cache-memory", "16MiB"]
FLAGS += ["--max-model-len", "512", "--alloc-trace"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.complaints = complaints
    yield page
    page.close()


Serve = Callable[..., str]


@pytest.fixture
def serve(checkpoint: Path, tmp_path: Path) -> Iterator[Serve]:
    processes = []

    def begin(*flags: str) -> str:
        named = ["--port", "0", "--failure-dir", str(tmp_path), "--served-model-name", "tiny"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.app.faulty_server", str(checkpoint), *FLAGS, *named, *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        processes.append(process)
        assert process.stderr is not None
        url = process.stderr.readline().split()[2].rstrip(";")
        for _ in range(600):
            if httpx.get(f"{url}/health").status_code == 200:
                return url
            time.sleep(0.05)
        raise AssertionError("it never was ready")

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait(page: Any, expression: str, *, timeout: float = 30) -> None:
    """Return when `expression` is true. Playwright has a way that needs `eval`, which the policy forbids."""
    end = time.monotonic() + timeout
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)


def figures(page: Any) -> dict[str, int]:
    """The ledger's table, in bytes."""
    cells: dict[str, int] = page.eval_on_selector_all(
        "#ledger [data-bytes]",
        "cells => Object.fromEntries(cells.map(cell => [cell.dataset.name, Number(cell.dataset.bytes)]))",
    )
    return cells


def test_its_figures_are_the_ledgers(page: Any, serve: Serve) -> None:
    url = serve()
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.querySelectorAll('#lines tbody tr').length > 20")
    page.wait_for_selector("#ledger [data-name=residual]")
    ledger = httpx.get(f"{url}/debug/alloc/ledger").json()
    shown = figures(page)
    assert shown["weights"] == ledger["segments"]["weights"]
    assert shown["kv"] == ledger["segments"]["kv"] > 0
    assert shown["residual"] == ledger["residual"]
    assert sum(shown.values()) == ledger["total"]
    assert page.inner_text("#engine") == "ready"
    assert page.inner_text("#connection") == "following"
    records = httpx.get(
        f"{url}/debug/alloc", headers={"accept": "application/x-ndjson"}, params={"last": 9999}
    )
    last = json.loads(records.text.splitlines()[-1])
    assert page.inner_text("#live") == f"{last['live'] / 2**30:.2f} GiB"
    # Drawn by the library: one path at least for each tag and for what is live.
    assert page.locator("#chart .scatterlayer .trace").count() >= 3
    assert "highest" in page.get_attribute("#chart", "aria-label")
    assert page.complaints == []


def test_an_instant_tells_who_was_live(page: Any, serve: Serve) -> None:
    url = serve()
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.querySelectorAll('#lines tbody tr').length > 20")
    page.focus("#instant")
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    wait(page, "document.getElementById('instant-text').textContent.includes('record 5:')")
    assert page.get_attribute("#follow", "aria-pressed") == "false"
    assert page.locator("#blocks tbody tr").count() == 5
    lines = httpx.get(f"{url}/debug/alloc", headers={"accept": "application/x-ndjson"}).text.splitlines()
    first = [json.loads(line) for line in lines[:5]]
    shown = page.inner_text("#blocks tbody")
    assert all(record["tag"] in shown for record in first)


def test_filters(page: Any, serve: Serve) -> None:
    url = serve()
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.querySelectorAll('#lines tbody tr').length > 20")
    for pattern in ("kv/", "*.layers.0.?", "weights/*norm*", "*[kv]"):
        page.fill("#tag", pattern)
        answer = httpx.get(
            f"{url}/debug/alloc",
            params={"tag": pattern, "last": 9999},
            headers={"accept": "application/x-ndjson"},
        )
        expected = len(answer.text.splitlines())
        assert expected > 0
        assert page.inner_text("#shown") == f"{expected} shown"
    page.fill("#tag", "")
    page.select_option("#kind", "failed")
    assert page.inner_text("#shown") == "0 shown"


def test_a_failure_is_explained(page: Any, serve: Serve) -> None:
    url = serve()
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.getElementById('engine').textContent === 'ready'")
    assert not page.is_visible("#failure")
    body = {"model": "tiny", "prompt": [faulty_engine.TOO_LARGE, 5], "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 503
    page.wait_for_selector("#failure:not([hidden])")
    [failure] = httpx.get(f"{url}/debug/alloc/failures").json()["failures"]
    record = httpx.get(f"{url}/debug/alloc/failures/{failure['id']}").json()
    wait(page, "document.getElementById('failure-what').textContent !== ''")
    assert page.inner_text("#failure-what") == record["what"]
    facts = page.inner_text("#failure-facts")
    for fact in (
        "workspace/too_large",
        record["allocation"]["why"],
        record["allocation"]["site"],
        record["id"],
    ):
        assert fact in facts
    assert record["requests"][0]["request_id"] in page.inner_text("#failure-requests")
    wait(page, "document.querySelectorAll('#lines tr.failed').length > 0")
    page.select_option("#ledger-choice", record["id"])
    wait(page, "document.getElementById('ledger-moment').textContent === 'at failure'")
    assert figures(page)["kv"] == record["ledger"]["segments"]["kv"]
    assert page.complaints == []


def test_it_goes_on_with_the_next_engine(page: Any, serve: Serve) -> None:
    url = serve()
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.getElementById('engine').textContent === 'ready'")
    server = int(re.findall(r":(\d+)$", url)[0])
    inode = subprocess.run(["pgrep", "-f", "tests.faulty_engine"], capture_output=True, text=True, check=True)
    engines = [int(pid) for pid in inode.stdout.split() if _parent_listens(int(pid), server)]
    os.kill(engines[0], signal.SIGKILL)
    page.wait_for_selector("#failure:not([hidden])")
    assert "SIGKILL" in page.inner_text("#failure-what")
    wait(page, "document.getElementById('engine').textContent === 'ready'", timeout=60)
    wait(page, "document.querySelectorAll('#lines tbody tr').length > 20")
    assert page.inner_text("#connection") == "following"


def _parent_listens(pid: int, port: int) -> bool:
    """The parent of `pid` is the server on `port`."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    sockets = {os.readlink(link) for link in Path(f"/proc/{parent}/fd").iterdir() if link.is_symlink()}
    for line in Path(f"/proc/{parent}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
            return f"socket:[{fields[9]}]" in sockets
    return False


def test_without_a_trace_it_says_how_to_get_one(page: Any, serve: Serve) -> None:
    url = serve("--no-alloc-trace")
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.getElementById('connection').textContent.includes('--alloc-trace')")
    page.wait_for_selector("#ledger [data-name=residual]")


def test_it_needs_the_key_and_takes_it_as_a_password(browser: Any, serve: Serve) -> None:
    url = serve("--api-key", "secret")
    assert httpx.get(f"{url}/debug/alloc/ui").status_code == 401
    context = browser.new_context(http_credentials={"username": "any", "password": "secret"})
    page = context.new_page()
    page.goto(f"{url}/debug/alloc/ui")
    wait(page, "document.querySelectorAll('#lines tbody tr').length > 20")
    context.close()


def test_sixty_thousand_records(page: Any, serve: Serve) -> None:
    """The model of the page holds a whole ring, and draws few points of it."""
    page.goto(f"{serve()}/debug/alloc/ui")
    found = page.evaluate(
        """async () => {
        const { TraceModel } = await import("./ui/trace_model.js");
        const model = new TraceModel();
        let live = 0;
        for (let i = 1; i <= 65536; i++) {
            const free = i % 2 === 0;
            live += free ? -1024 : 1024;
            const sequence = Math.ceil(i / 2);
            const record = { index: i, kind: free ? "free" : "alloc", sequence, size: 1024, live };
            model.add({ ...record, free: 1e9 - live, pool_reserved: null, tag: "kv/a", wall_ns: i * 1000 });
        }
        model.add({ ...model.records[10] });
        return { points: model.points().length, records: model.records.length,
            live: [...model.liveAt(65534).keys()], lowest: model.lowest.free };
        }"""
    )
    assert found == {"points": found["points"], "records": 65536, "live": [32768], "lowest": 10**9 - 1024}
    assert found["points"] <= 3100
