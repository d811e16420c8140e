"""Other programs' traces, as events that all tools take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from app.trace.importers.log import read_log
from app.trace.importers.torch_snapshot import read_snapshot
from engine.memory.errors import TraceFileError
from engine.memory.record import TraceEvent, TraceHeader

__all__ = ["FORMATS", "import_trace"]

FORMATS = ("torch-snapshot", "log")
_PICKLE_PROTOCOL = b"\x80"


def import_trace(
    path: Path, form: str | None = None, *, device: int | None = None, segments: bool = False
) -> tuple[TraceHeader, Iterator[TraceEvent]]:
    """Header and events of another program's file.

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
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be opened: {error.strerror}") from error
    with file:
        try:
            start = file.read(1)
            file.seek(0)
            if (form or ("torch-snapshot" if start == _PICKLE_PROTOCOL else "log")) == "torch-snapshot":
                return read_snapshot(str(path), file.read(), device=device, segments=segments)
        except OSError as error:
            raise TraceFileError(f"{path}: cannot be read: {error.strerror}") from error
    return read_log(path)
