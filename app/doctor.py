"""What of this machine vtserve can use, and what to do about the rest."""

from __future__ import annotations

import enum
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.config import EngineConfig
from engine.directories import cache_directory, under_home
from engine.errors import VtserveError
from engine.failure import failure_directory
from engine.memory.resources import host_capacity

__all__ = ["Finding", "State", "examine"]

_LEAST_FREE = 1 << 30
_GIB = 1 << 30


class State(enum.Enum):
    """How something stands."""

    OK = "ok"
    MISSING = "missing"
    """not there, and not needed for everything"""
    BROKEN = "broken"
    """vtserve does not work until it is mended"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    what: str
    advice: str = ""
    """what to do; empty if nothing is to be done"""


def examine(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at everything, one after the other. Nothing is changed, fetched or loaded onto a device."""
    for check in (_python, _cpu, _kernels, _gpu, _compiler):
        yield _guarded(check)
    yield _folder("model cache", cache_directory(environ), "VTSERVE_CACHE")
    yield _folder("hub cache", under_home(environ.get("HF_HOME") or "~/.cache/huggingface"), "HF_HOME")
    records = failure_directory(EngineConfig(model="any"), environ)
    yield _folder("failure records", records, "--failure-dir or XDG_STATE_HOME")
    yield _folder("temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    for name, (module, extra) in _EXTRAS.items():
        yield _extra(name, module, extra)


def _guarded(check: Callable[[], Finding]) -> Finding:
    """A check that runs into something nobody thought of is a finding, too."""
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_")
        return Finding(name, State.BROKEN, f"{type(error).__name__}: {' '.join(str(error).split())}")


def _python() -> Finding:
    version = f"{platform.python_version()} at {sys.executable}, vtserve {metadata.version('vtserve')}"
    if sys.version_info < (3, 11):  # noqa: UP036  # whoever ignored the package's own condition
        return Finding("Python", State.BROKEN, version, "use Python 3.11 or newer")
    return Finding("Python", State.OK, version)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    what = f"{platform.machine()}, {cores} cores, {host_capacity() / _GIB:.1f} GiB for the CPU device"
    return Finding("CPU", State.OK, what)


def _kernels() -> Finding:
    import numba

    what = f"numba {numba.__version__}"
    probe = Path(importlib.util.find_spec("engine.backend.cpu").submodule_search_locations[0])  # type: ignore[union-attr, index]
    own = os.environ.get("NUMBA_CACHE_DIR")
    places = [Path(own)] if own else [probe / "__pycache__", under_home("~/.cache")]
    writable = next((place for place in places if place is not None and _is_writable(place)), None)
    if writable is None:
        advice = (
            "set NUMBA_CACHE_DIR to a folder that can be written: else kernels are compiled at each start"
        )
        return Finding("CPU kernels", State.MISSING, f"{what}, no cache", advice)
    return Finding("CPU kernels", State.OK, f"{what}, cached under {writable}")


def _gpu() -> Finding:
    from engine.backend.cuda.requirements import check_device

    try:
        capacity = check_device(0)
    except (VtserveError, ImportError) as error:
        text = str(error).removeprefix("--device cuda: ")
        return Finding("GPU", State.MISSING, text, "none is needed for --device cpu")
    return Finding("GPU", State.OK, f"{capacity / _GIB:.1f} GiB of device memory")


def _compiler() -> Finding:
    from engine.backend.cuda.compiler import compiler_version

    try:
        version = compiler_version()
    except (VtserveError, ImportError) as error:
        text = str(error).removeprefix("--device cuda: ")
        return Finding("NVRTC", State.MISSING, text, "for a GPU: pip install 'vtserve[cuda]'")
    return Finding("NVRTC", State.OK, ".".join(map(str, version)))


def _folder(name: str, path: Path | None, variable: str) -> Finding:
    if path is None:
        return Finding(name, State.BROKEN, "no home directory", f"name a folder with {variable}")
    if not _is_writable(path):
        what = f"{path} cannot be written"
        return Finding(name, State.BROKEN, what, f"give it to this user, or name another with {variable}")
    free = shutil.disk_usage(_nearest(path)).free
    what = f"{path}, {free / _GIB:.1f} GiB free"
    if free < _LEAST_FREE:
        return Finding(name, State.MISSING, what, f"make room, or name another with {variable}")
    return Finding(name, State.OK, what)


def _is_writable(path: Path) -> bool:
    """Files can be made in `path`, or it can be made itself."""
    nearest = _nearest(path)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _nearest(path: Path) -> Path:
    """`path`, or the nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


_EXTRAS = {
    "allocation observer": ("cupti", "observe"),
    "Perfetto and pprof export": ("perfetto", "export"),
}


def _extra(name: str, module: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(name, State.MISSING, "not installed", f"pip install 'vtserve[{extra}]'")
    return Finding(name, State.OK, "installed")
