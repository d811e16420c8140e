"""Where a verb writes a file to."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engine.errors import ConfigurationError

__all__ = ["output_file"]


@contextmanager
def output_file(path: Path | None) -> Iterator[BinaryIO]:
    """A stream to `path`, which is there only once all was written; None (or ``-``): standard output."""
    if path is None or str(path) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.exists() and not path.is_file():  # a pipe, /dev/null
        with _named(path), path.open("wb") as stream:
            yield stream
        return
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigurationError(f"--out {path}: {error.strerror}") from error
    try:
        with _named(path), os.fdopen(handle, "wb") as stream:
            yield stream
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(stream.fileno(), 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have what cannot be written there say so: a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
