"""Directories and ids: the hub's own client against a server on the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors

from engine.errors import CheckpointError
from engine.model.hub import resolve_model
from tests.model.fake_hub import Hub, serving


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


def test_a_name_longer_than_the_file_system_takes_is_one_line() -> None:
    with pytest.raises(CheckpointError, match=r"^a/b+…: File name too long$"):
        resolve_model("a/" + "b" * 5000)


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
        (OSError(28, "No space left on device"), "hub cannot keep it: No space left on device; HF_HOME=DIR"),
        (RuntimeError("CAS: IO Error: full (os error 28)"), "hub cannot keep it: No space left on device"),
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
    with serving({**WANTED, **UNWANTED}) as hub:
        yield hub


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
