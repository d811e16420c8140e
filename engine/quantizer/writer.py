"""Writes checkpoints: tensors in shards of bounded size, JSON files, and a directory that appears complete or
not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from engine.errors import CheckpointError, ConfigurationError

__all__ = ["SHARD_BYTES", "CheckpointWriter", "UnwritableError", "new_directory"]

SHARD_BYTES = 4 * 2**30
"""tensors are held back until a shard of this size is full, so this bounds the memory that writing takes"""
_INDEX = "model.safetensors.index.json"


class UnwritableError(CheckpointError):
    """A file or directory cannot be written: the disk is full, say.

    Attributes
    ----------
    reason : str
        The system's.
    """

    def __init__(self, path: Path, error: Exception | str) -> None:
        self.reason = error if isinstance(error, str) else _reason(error)
        super().__init__(f"{path}: cannot be written: {self.reason}")


class CheckpointWriter:
    """Collects tensors and writes them as ``model.safetensors``, or as numbered shards with an index.

    A context manager; `finish` must be called in it. Arrays may have dtypes of `ml_dtypes` (bfloat16,
    float8_e4m3fn).

    Raises
    ------
    UnwritableError
        A file cannot be written.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, np.ndarray] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, array: np.ndarray) -> None:
        """Take a tensor. `array` must not be changed afterwards."""
        if self._pending and self._pending_bytes + array.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = np.ascontiguousarray(array).reshape(array.shape)
        self._pending_bytes += array.nbytes

    def finish(self) -> None:
        """Write what is pending and, for several shards, give them their names and the index."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        if count == 1:
            self._shard_path(0).rename(self.directory / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._shard_path(number).rename(self.directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        self.write_json(_INDEX, index)

    def write_json(self, name: str, content: Any) -> None:
        """Write one of the checkpoint's JSON files."""
        path = self.directory / name
        try:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UnwritableError(path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pending.clear()

    def _flush(self) -> None:
        path = self._shard_path(len(self._shards))
        try:
            # safetensors makes a file for its owner alone; this one is like any other that the user makes.
            path.touch()
            mode = path.stat().st_mode
            save_file(self._pending, path, metadata={"format": "pt"})
            path.chmod(mode)
        except (OSError, SafetensorError) as error:
            raise UnwritableError(path, error) from None
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending.clear()
        self._pending_bytes = 0

    def _shard_path(self, number: int) -> Path:
        return self.directory / f"shard-{number}.partial"


@contextlib.contextmanager
def new_directory(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary sibling of `out` to write into, which becomes `out` when the block ends well.

    When the block raises, the sibling is removed and `out` is as it was. Siblings of processes that were
    killed are removed, too.

    Parameters
    ----------
    force
        Replace a checkpoint. Nothing else is: a directory named by mistake is not emptied.

    Raises
    ------
    ConfigurationError
        `out` holds something and `force` was not given, or it holds something else than a checkpoint; or it
        is a mount point, which cannot be replaced.
    UnwritableError
        It cannot be made, or something in it cannot be written: `out` is named.
    """
    _check_replaceable(out, force)
    out = Path(os.path.realpath(out))  # what a link leads to is replaced, not the link; and "." has a name
    try:
        with _partial_directory(out) as partial:
            yield partial
            _sync(partial)
            if out.is_dir() and any(out.iterdir()):
                replaced = out.parent / f".{out.name}.replaced-{uuid.uuid4().hex[:8]}"
                out.rename(replaced)
                partial.rename(out)
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                partial.rename(out)
    except UnwritableError as error:
        raise UnwritableError(out, error.reason) from None
    except OSError as error:
        raise UnwritableError(out, error) from None


@contextlib.contextmanager
def _partial_directory(out: Path) -> Iterator[Path]:
    """A sibling of `out` that is locked for as long as its process lives, and removed in the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    with contextlib.ExitStack() as held:
        is_ours = False
        while not is_ours:
            partial = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
            partial.mkdir()
            held.callback(shutil.rmtree, partial, ignore_errors=True)
            try:
                is_ours = held.enter_context(_lock(partial))
            except OSError:
                is_ours = True  # there are no locks on this file system: nobody else gets one either
        yield partial


def _remove_leftovers(out: Path) -> None:
    """Remove the siblings of `out` whose process was killed: nobody holds their locks."""
    name = re.compile(rf"\.{re.escape(out.name)}\.partial-[0-9a-z_]{{8}}")
    for path in out.parent.iterdir():
        if name.fullmatch(path.name):
            with contextlib.suppress(OSError), _lock(path) as is_ours:
                if is_ours:
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Hold the lock of `directory`, which the system takes back from a process that is killed.

    False if another process holds it, or has removed the directory. Raises OSError where there are no locks.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        else:
            is_ours = directory.exists()
        yield is_ours
    finally:
        os.close(descriptor)


def _check_replaceable(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out}: is a file; expected a directory")
    if os.path.ismount(out):
        raise ConfigurationError(f"--out {out}: is a mount point; expected a directory in it")
    held = sorted(out.iterdir()) if out.is_dir() else []
    if held and not force:
        raise ConfigurationError(f"--out {out}: is not empty; give --force to replace it")
    if held and (reason := _not_a_checkpoint(held)):
        raise ConfigurationError(f"--out {out}: is no checkpoint that could be replaced: it holds {reason}")


def _not_a_checkpoint(held: list[Path]) -> str | None:
    """What tells that files are not a checkpoint's, whose files lie side by side; None if nothing does."""
    directory = next((path for path in held if path.is_dir()), None)
    if directory is not None:
        return f"the directory {directory.name}"
    return None if any(path.name == "config.json" for path in held) else "no config.json"


def _sync(directory: Path) -> None:
    """Push files to the disk, so that after a power cut the name does not stand for files that never got
    there."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    # safetensors writes in Rust: "Error while serializing: I/O error: No space left (os error 28)".
    number = re.search(r"\(os error (\d+)\)", text)
    return os.strerror(int(number[1])) if number else text
