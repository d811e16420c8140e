"""Reports of failures: what a person needs to know when the engine, or a request in it, died.

A record is one JSON file. Writing it must not fail in turn: whatever cannot be found out any more is left
out, and whatever cannot be written is said on stderr.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.directories import under_home
from engine.errors import EngineDeadError
from engine.failure_record import (
    ExceptionRecord,
    FailureRecord,
    RequestRecord,
    StepRecord,
    allocation_record,
    failed_line,
)
from engine.levers import Lever, describe_levers
from engine.memory.errors import AllocationError, AllocationRequest
from engine.memory.house import MemoryHouse

__all__ = ["FailureReporter", "failure_directory", "summarize_error"]

_TRACE_LINES = 200

T = TypeVar("T")


class FailureReporter:
    """Makes failure records, writes them, and says so on stderr.

    Parameters
    ----------
    directory
        Where records are written. Created when the first one is.
    config
        Its flags are recorded; `record_prompts` decides about prompts.
    output
        Takes the ``engine-fatal`` lines.

    Attributes
    ----------
    house, levers, decode
        Set as the engine is built, as far as it came: the memory house, what finds levers for a request that
        failed, and how to turn prompt tokens into text.
    on_record
        Told of each record, after it was written.
    """

    def __init__(self, directory: Path, config: EngineConfig, *, output: TextIO) -> None:
        self.directory = directory
        self.config = config
        self.output = output
        self.house: MemoryHouse | None = None
        self.levers: Callable[[AllocationRequest], list[Lever]] | None = None
        self.decode: Callable[[Sequence[int]], str] | None = None
        self.on_record: Callable[[FailureRecord], None] = lambda record: None

    def report(
        self,
        error: BaseException,
        *,
        doing: str,
        fatal: bool,
        step: StepRecord | None = None,
        requests: Sequence[RequestRecord] = (),
    ) -> FailureRecord:
        """Record that `error` was thrown while `doing`. Never raises."""
        record = self.begin(error, doing=doing, fatal=fatal)
        record.step = step
        record.requests = list(requests)
        if isinstance(error, AllocationError):
            record.allocation = allocation_record(error.request)
            record.levers = _attempt(lambda: self._levers(error), [])
        if (house := self.house) is not None:
            # After a sticky error the device answers nothing: each of these may fail alone.
            record.ledger = _attempt(lambda: house.ledger("at failure").to_dict(), None)
            record.statistics = _attempt(house.statistics_dict, None)
            record.trace = _attempt(lambda: house.last_lines(_TRACE_LINES), [])
        if fatal and house is not None:
            house.stop_printing()  # what is torn down now would push the failure off the screen
            if isinstance(error, AllocationError) and house.tracing is None:
                self._say(failed_line(error.request, house.gauge.device))
        self.publish(record, verb=None if step is None else "threw")
        return record

    def begin(self, error: BaseException, *, doing: str, fatal: bool) -> FailureRecord:
        """A record that has nothing but the exception in it, for somebody who was not there to fill in."""
        now = datetime.now(UTC)
        return FailureRecord(
            id=f"{now:%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(3)}",
            time=now.isoformat(timespec="milliseconds"),
            fatal=fatal,
            doing=doing,
            what=summarize_error(error),
            exception=ExceptionRecord(
                type=f"{type(error).__module__}.{type(error).__qualname__}",
                message=str(error),
                traceback=traceback.format_exception(error),
            ),
            config=self.config,
            versions=_versions(),
            pid=os.getpid(),
        )

    def publish(self, record: FailureRecord, *, verb: str | None) -> None:
        """Say what a fatal `record` tells, write it, and hand it on. Never raises.

        `verb` is what the busy loop did; None if it was not there yet.
        """
        for request in record.requests:
            request.prompt = _attempt(partial(self._prompt, request), None)
        if record.fatal:
            separator = ": " if verb is None else f" {verb}: "
            self._say(f"engine-fatal: {record.doing}{separator}{record.what}")
            if record.allocation is not None and record.allocation.get("error"):
                self._say(f"engine-fatal: {describe_levers(record.levers)}")
        self.write(record)
        with suppress(Exception):
            self.on_record(record)

    def dead(self, record: FailureRecord) -> EngineDeadError:
        """The error for whoever asks more of the engine."""
        state = "the engine stopped" if record.step is not None else "the engine did not start"
        where = record.path or f"{record.id} (not written)"
        return EngineDeadError(f"{state}; failure record: {where}", failure_id=record.id)

    def _prompt(self, request: RequestRecord) -> str | None:
        if self.decode is None or request.prompt_token_ids is None:
            return None
        return self.decode(request.prompt_token_ids)

    def _levers(self, error: AllocationError) -> list[Lever]:
        return [] if self.levers is None else self.levers(error.request)

    def write(self, record: FailureRecord) -> None:
        """Write `record`, and nothing else; says so on stderr if that fails. Never raises."""
        path = self.directory / f"{record.id}.json"
        record.path = os.fsencode(path).decode("utf-8", "backslashreplace")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=2))
        except Exception as error:
            record.path = None
            why = summarize_error(error)
            self._say(f"engine-fatal: failure record {record.id} cannot be written: {why}")

    def _say(self, line: str) -> None:
        with suppress(Exception):  # stderr may be closed
            print(line, file=self.output, flush=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader finds all of it or nothing, also after a crash."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def failure_directory(config: EngineConfig, environ: Mapping[str, str]) -> Path:
    """`failure_dir`, else ``$XDG_STATE_HOME/vtserve/failures``, else the same under ``~/.local/state``.

    Where there is no home either, a directory of this user's among the temporary files.
    """
    if config.failure_dir is not None:
        return Path(config.failure_dir)
    base = environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "vtserve" / "failures"
    homeless = Path(environ.get("TMPDIR") or "/tmp", f"vtserve-{os.getuid()}", "failures")
    return under_home("~/.local/state/vtserve/failures") or homeless


def summarize_error(error: BaseException) -> str:
    """An exception in one line. An error of ours, or of the system, is told by its text alone."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if type(error).__module__.partition(".")[0] == "engine" and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _attempt(find: Callable[[], T], otherwise: T) -> T:
    try:
        return find()
    except Exception:
        return otherwise


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in ("vtserve", "numpy", "numba", "cuda-core", "cuda-bindings", "safetensors", "tokenizers"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
