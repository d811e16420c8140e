"""Other programs' traces, as events that all tools take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import cast

from app.trace.importers.log import read_log
from app.trace.importers.torch_snapshot import read_snapshot
from engine.memory.errors import TraceFileError
from engine.memory.record import TraceEvent, TraceHeader

__all__ = ["FORMATS", "import_trace"]

FORMATS = ("torch-snapshot", "log")
_PICKLE_PROTOCOL = b"\x80"


@contextmanager
def import_trace(
    path: Path, form: str | None = None, *, device: int | None = None, segments: bool = False
) -> Iterator[tuple[TraceHeader, Iterator[TraceEvent]]]:
    """Header and events of another program's file; ``-`` is standard input.

    Parameters
    ----------
    form
        One of `FORMATS`; None: a file that begins like a pickle is a torch memory snapshot, any other a log.
    device
        Which device of a snapshot; None: the only one that has anything.
    segments
        Of a snapshot, what torch's allocator asked of the driver and not what tensors asked of it.

    Raises
    ------
    TraceFileError
        Missing, of another kind, or damaged; a log's lines are read as the events are.
    ConfigurationError
        `device` is none of the snapshot's.
    """
    with ExitStack() as stack:
        name = str(path)
        try:
            if name == "-":
                name, file = "standard input", cast(BufferedReader, sys.stdin.buffer)
            else:
                file = stack.enter_context(path.open("rb"))
            start = file.peek(1)[:1]  # it may be a pipe, which cannot be wound back
            is_snapshot = form == "torch-snapshot" or (form is None and start == _PICKLE_PROTOCOL)
            data = file.read() if is_snapshot else b""
        except OSError as error:
            raise TraceFileError(f"{name}: cannot be read: {error.strerror}") from error
        if is_snapshot:
            yield read_snapshot(name, data, device=device, segments=segments)
        else:
            yield read_log(name, file)
