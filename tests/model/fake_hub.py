"""The Hugging Face hub's HTTP interface on loopback, as far as its client asks for one model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One model on a server, and what was asked of it."""

    files: dict[str, bytes]
    status: int = 200
    port: int = 0
    requests: list[str] = field(default_factory=list)
    sent: int = 0
    """bytes of files"""

    def resolve(
        self, home: Path, model: str = "owner/name", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """`resolve_model` in a process of its own: the client reads its environment when it is imported."""
        script = (
            "import sys; from engine.errors import CheckpointError\n"
            "from engine.model.hub import resolve_model\n"
            "try: print(resolve_model(sys.argv[1]))\n"
            "except CheckpointError as error: sys.exit(f'refused: {error}')"
        )
        return self.run([sys.executable, "-c", script, model], home, **environ)

    def run(self, command: list[str], home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """`command`, to which this is the hub."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        variables = {
            "HF_HOME": str(home),
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        return subprocess.run(
            command,
            env={**kept, **variables, **environ},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


class Handler(BaseHTTPRequestHandler):
    """What the client asks: the model's files, then each file by HEAD and by GET."""

    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self, body: bool) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(path)
        data = self._data(path)
        headers = {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}
        status = self.hub.status
        if data is None:
            status, data = 404, b"{}"
        elif "/resolve/" in path:
            headers["ETag"] = f'"{sha1(data).hexdigest()}"'
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted and status == 200:
                first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
                status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(data)}"
                data = data[first : last + 1]
            self.hub.sent += len(data) if body else 0
        if status == 401:
            headers["X-Error-Code"] = "RepoNotFound"
        elif status == 403:
            headers["X-Error-Code"] = "GatedRepo"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _data(self, path: str) -> bytes | None:
        if "/resolve/" in path:
            return self.hub.files.get(path.split("/resolve/")[1].partition("/")[2])
        if "/tree/" in path:
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
                for name, data in self.hub.files.items()
            ]
            return json.dumps(listing).encode()
        if path.startswith("/api/models/owner/name"):
            siblings = [{"rfilename": name} for name in self.hub.files]
            return json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        return None


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub that has ``owner/name`` with `files`."""
    hub = Hub(files)
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
