"""Directories and ids: the hub's own client against a server on the loopback interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import errors

from engine.errors import CheckpointError
from engine.model.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(model: str) -> str:
        raise AssertionError(model)

    assert resolve_model(str(tmp_path), download=no_download) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("~/owner/name", download=no_download) == tmp_path / "owner" / "name"
    # A directory that looks like an id is a directory.
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name", download=no_download) == Path("owner/name")


def test_an_id_is_downloaded(tmp_path: Path) -> None:
    asked = []

    def download(model: str) -> str:
        asked.append(model)
        return str(tmp_path)

    assert resolve_model("Org-1/Model_2.5-NVFP4", download=download) == tmp_path
    assert asked == ["Org-1/Model_2.5-NVFP4"]


@pytest.mark.parametrize(
    "model",
    [
        "",
        "model",
        "a/b/c",
        "./a/b",
        "../b",
        "-a/b",
        "a b/c",
        "http://x/y",
        "a/b\n",
        "/nowhere/b",
        "é/b",
        "a/\0",
    ],
)
def test_what_is_neither_is_never_asked_for(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "..")

    def no_download(model: str) -> str:
        raise AssertionError(model)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such directory") as caught:
        resolve_model(model or "nothing", download=no_download)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"m\.gguf: expected a model directory, found a file"):
        resolve_model(str(tmp_path / "m.gguf"))


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.GatedRepoError("403", response=RESPONSE), "gated on the .*: accept its terms"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "not found on the Hugging Face hub"),
        (errors.OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE forbids fetching it"),
        (errors.LocalEntryNotFoundError("no"), "the Hugging Face hub cannot be reached"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("first\nsecond"), "hub: first$"),
        (RuntimeError(), "hub: RuntimeError$"),
    ],
)
def test_every_failure_is_one_line_with_a_reason(error: Exception, said: str) -> None:
    def download(model: str) -> str:
        raise error

    with pytest.raises(CheckpointError, match=rf"^owner/name: no such directory, and .*{said}") as caught:
        resolve_model("owner/name", download=download)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


# -- the hub's own client ----------------------------------------------------------------------------------


@dataclass
class Hub:
    """One model on a server, and what was asked of it."""

    files: dict[str, bytes]
    status: int = 200
    port: int = 0
    requests: list[str] = field(default_factory=list)

    def resolve(
        self, home: Path, model: str = "owner/name", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """`resolve_model` in a process of its own: the client reads its environment when it is imported."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        variables = {
            "HF_HOME": str(home),
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        script = (
            "import sys; from engine.errors import CheckpointError\n"
            "from engine.model.hub import resolve_model\n"
            "try: print(resolve_model(sys.argv[1]))\n"
            "except CheckpointError as error: sys.exit(f'refused: {error}')"
        )
        return subprocess.run(
            [sys.executable, "-c", script, model],
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


WANTED = {
    "config.json": b'{"a": 1}',
    "model-00001-of-00002.safetensors": b"x" * 1000,
    "model-00002-of-00002.safetensors": b"y" * 10,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
}
UNWANTED = {
    "README.md": b"no",
    "pytorch_model.bin": b"no",
    "consolidated.safetensors": b"no",
    "original/model.safetensors": b"no",
    "onnx/config.json": b"no",
    "evil.py": b"no",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub({**WANTED, **UNWANTED})
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


def test_an_id_is_fetched_once_without_what_is_not_needed(hub: Hub, tmp_path: Path) -> None:
    done = hub.resolve(tmp_path)
    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip())
    assert {p.name: p.read_bytes() for p in found.rglob("*") if p.is_file()} == WANTED
    assert hub.requests
    # It is in the cache now: without the network too.
    hub.requests.clear()
    again = hub.resolve(tmp_path, HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout
    assert hub.requests == []


@pytest.mark.parametrize(
    ("status", "said"), [(401, "not found on the Hugging Face hub"), (403, "gated on the Hugging Face hub")]
)
def test_what_the_hub_refuses(hub: Hub, tmp_path: Path, status: int, said: str) -> None:
    hub.status = status
    done = hub.resolve(tmp_path)
    assert done.returncode == 1
    assert f"refused: owner/name: no such directory, and {said}" in done.stderr
    assert hub.requests


def test_no_network_and_no_cache(hub: Hub, tmp_path: Path) -> None:
    offline = hub.resolve(tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids fetching it" in offline.stderr
    assert hub.requests == []
    unreachable = hub.resolve(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the Hugging Face hub cannot be reached" in unreachable.stderr
    for done in (offline, unreachable):
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
