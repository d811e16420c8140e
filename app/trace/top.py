"""What the memory looks like now, for a terminal: out of a flight recorder's file, or from a server."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.open_ai import ServerError, what_went_wrong
from engine.memory.cursor import TraceCursor
from engine.memory.lines import format_line
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import EventKind, EventState, TraceEvent

__all__ = ["FileTop", "ServerTop", "Snapshot", "TopSource", "render"]

_LINES = 200
_MIB = 1 << 20
_SECONDS = 10.0
_OVERHEADS = ("pool_slack", "rounding", "context", "library", "other_processes", "bypass", "residual")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is shown at one moment."""

    title: str
    total: int
    """bytes of the device"""
    entries: Mapping[str, int]
    """what the bytes are, in bytes: they add up to `total`"""
    lines: list[str] = field(default_factory=list)
    """the newest last"""
    figures: Mapping[str, str] = field(default_factory=dict)
    """requests, tokens, failures"""


class TopSource(Protocol):
    """Where snapshots come from."""

    def look(self) -> Snapshot:
        """What it is like now."""

    def close(self) -> None:
        """Look no more."""


class FileTop:
    """Out of a flight recorder's file. When its writer is started again, the new file is read on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open(FlightRecorderReader(path))

    def _open(self, reader: FlightRecorderReader) -> None:
        self._reader = reader
        self._cursor = TraceCursor(reader)
        self._live: dict[int, tuple[str, int]] = {}
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._free: int | None = None
        self._requests = self._failures = self._lost = 0

    def look(self) -> Snapshot:
        if self._reader.replaced:
            replacement = FlightRecorderReader(self._path)
            self._reader.close()
            self._open(replacement)
        for event in self._cursor.advance().events():
            self._take(event)
        header = self._reader.header
        segments: dict[str, int] = {}
        for segment, size in self._live.values():
            segments[segment] = segments.get(segment, 0) + size
        free = header.total if self._free is None else self._free
        entries = dict(sorted(segments.items(), key=lambda item: -item[1]))
        entries["not in the trace"] = header.total - free - sum(segments.values())
        entries["free"] = free
        figures = {"requests for memory": f"{self._requests:,}", "failed": f"{self._failures:,}"}
        if self._lost:
            figures["records lost"] = f"{self._lost:,}"
        state = "closed" if self._reader.closed_ns else f"process {header.pid}"
        return Snapshot(
            f"{self._path.name}, {header.device}, {state}", header.total, entries, list(self._lines), figures
        )

    def _take(self, event: TraceEvent) -> None:
        self._lines.append(format_line(event, self._reader.header.device))
        if event.kind is EventKind.GAP:
            self._lost += event.size
            return
        self._requests = max(self._requests, event.sequence)
        self._failures += event.state is EventState.FAILED
        if event.free is not None and event.kind in (EventKind.ALLOC, EventKind.FREE):
            self._free = event.free
        if event.state is EventState.OK and event.kind is EventKind.ALLOC:
            self._live[event.sequence] = (event.tag.partition("/")[0], event.size)
        elif event.state is EventState.OK and event.kind is EventKind.FREE:
            self._live.pop(event.sequence, None)

    def close(self) -> None:
        self._reader.close()


class ServerTop:
    """From a server's ``/debug/alloc`` and ``/metrics``."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(base_url=self._url, headers=headers, timeout=_SECONDS)
        self._tokens: tuple[float, float] | None = None

    def look(self) -> Snapshot:
        """Raises ServerError if the server is not there, or refuses."""
        ledger_answer = self._get("/debug/alloc/ledger", missing=True)
        ledger: dict[str, Any] = {"total": 0, "free": 0, "segments": {}}
        if ledger_answer is not None:
            ledger = ledger_answer.json()
        trace = self._get(f"/debug/alloc?last={_LINES}", missing=True)
        ready = self._get("/health", missing=True, unready=True) is not None
        metrics = self._get("/metrics")
        assert metrics is not None
        entries = dict(ledger["segments"])
        entries |= {name.replace("_", " "): ledger.get(name, 0) for name in _OVERHEADS if ledger.get(name)}
        entries["free"] = ledger["free"]
        lines = ["tracing is off"] if trace is None else trace.text.splitlines()
        state = "ready" if ready else "not ready"
        return Snapshot(f"{self._url}, {state}", ledger["total"], entries, lines, self._figures(metrics.text))

    def _figures(self, text: str) -> dict[str, str]:
        def value(name: str) -> float:
            found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            return sum(map(float, found))

        now, tokens = time.monotonic(), value("vllm:generation_tokens_total")
        before, self._tokens = self._tokens, (now, tokens)
        rate = 0.0 if before is None else (tokens - before[1]) / max(now - before[0], 1e-9)
        return {
            "running": f"{value('vllm:num_requests_running'):.0f}",
            "waiting": f"{value('vllm:num_requests_waiting'):.0f}",
            "tokens/s": f"{rate:.1f}",
            "KV cache": f"{100 * value('vllm:kv_cache_usage_perc'):.0f} %",
            "failed": f"{value('vtserve_alloc_failures_total'):.0f}",
            "restarts": f"{value('vtserve_engine_restarts_total'):.0f}",
        }

    def _get(self, path: str, *, missing: bool = False, unready: bool = False) -> httpx.Response | None:
        """The response; None for what may be `missing`, or from an engine that may be `unready`."""
        try:
            response = self._client.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{self._url}: {error or type(error).__name__}") from None
        if (response.status_code == 404 and missing) or (response.status_code == 503 and unready):
            return None
        if response.status_code != 200:
            raise ServerError(f"{self._url}: {what_went_wrong(response)}")
        return response

    def close(self) -> None:
        self._client.close()


def render(snapshot: Snapshot, *, height: int) -> RenderableType:
    """`snapshot` in `height` rows: bars by what the bytes are, figures, the newest lines."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(ratio=1)
    for name, size in snapshot.entries.items():
        share = size / snapshot.total if snapshot.total else 0.0
        style = _STYLES.get(name, "white")
        bar = ProgressBar(total=1.0, completed=max(share, 0.0), complete_style=style, finished_style=style)
        table.add_row(Text(name, style=style), f"{size / _MIB:,.1f} MiB", f"{100 * share:.1f} %", bar)
    table.add_row("total", f"{snapshot.total / _MIB:,.1f} MiB", "", "")
    figures = "   ".join(f"{name} {value}" for name, value in snapshot.figures.items())
    room = max(height - len(snapshot.entries) - 5, 1)
    lines = [
        Text(line, no_wrap=True, overflow="ellipsis", style="bold red" if " FAILED " in line else "")
        for line in snapshot.lines[-room:]
    ]
    return Group(Text(snapshot.title, style="bold"), table, Text(figures), Text(), *lines)


_STYLES = {
    "weights": "blue",
    "kv": "green",
    "workspace": "yellow",
    "repack": "magenta",
    "io": "cyan",
    "residual": "red",
    "bypass": "red",
    "free": "bright_black",
}
