"""A ``vtserve serve`` under measurement: started, asked, watched and ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

__all__ = ["Server"]

_PAGE = 4096


class Server:
    """A server on a free port, in a process of its own."""

    def __init__(self, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        found = re.search(r"http://\S+?(?=;)", line)
        if found is None:
            raise SystemExit(line + self._process.stderr.read())
        self.url = found.group()
        self.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, seconds: float = 120) -> None:
        """Return when the engine is ready."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                assert self._process.stderr is not None
                raise SystemExit(self._process.stderr.read())
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise SystemExit("the engine was not ready in time")

    def engines(self) -> list[int]:
        """Processes whose parent the server is."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def metric(self, name: str) -> float:
        """The value of a figure in ``/metrics``; 0 if it is not there."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf"^{re.escape(name)}(?:{{.*?}})? (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    @staticmethod
    def resident(pid: int) -> int:
        """Bytes of a process in memory now."""
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
