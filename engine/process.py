"""The engine's process: builds the engine that it is told to, serves it, and ends with whoever started it.

Started as ``python -m engine.process SOCKET STACKS``: descriptors of its end of a socket pair that speaks
`engine.wire`, and of a file that takes the stacks of all threads at each SIGUSR1. It outlives nobody: when
the other end closes, whichever way that process ended, it ends too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from engine.compose import Engine, build_engine
from engine.errors import CheckpointError, ConfigurationError, EngineDeadError
from engine.failure_record import FailureRecord
from engine.memory.errors import TraceFileError
from engine.memory.house import MemoryHouse
from engine.messages import EngineFailed, EngineMessage, OutputMessage
from engine.wire import (
    EngineReady,
    FailureReport,
    IntoEngine,
    LoadProgress,
    LoadRefused,
    MemoryReport,
    OutOfEngine,
    StartEngine,
    WireSocket,
)

__all__ = ["EXIT_FAILED", "EXIT_ORPHANED", "EXIT_REFUSED", "run_engine"]

EXIT_FAILED = 70
"""the engine threw; its record was sent"""
EXIT_REFUSED = 78
"""a flag or the checkpoint cannot be used"""
EXIT_ORPHANED = 71
"""the watching process is gone"""

_PROGRESS_SECONDS = 0.1
_REPORT_SECONDS = 1.0
_IDLE_REPORT_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1


def run_engine(descriptor: int, stacks: int, *, build: Callable[..., Engine] = build_engine) -> int:
    """Serve over the socket `descriptor` until told to stop. At SIGUSR1 threads' stacks go to `stacks`.

    Parameters
    ----------
    build
        Makes the engine; takes what `build_engine` does.

    Returns
    -------
    int
        The status to exit with.
    """
    _die_with_parent()
    # A terminal sends Ctrl-C to everybody; the watching process says what becomes of the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The watching process asks a process that hangs for its stacks.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    wire = _Wire(socket.socket(fileno=descriptor))
    inbox: queue.SimpleQueue[IntoEngine] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(wire, inbox), name="inbox", daemon=True).start()
    start = inbox.get()
    assert isinstance(start, StartEngine), "the first message starts the engine"
    logging.basicConfig(level=start.log_level, format="%(levelname)s: %(message)s")

    def report(record: FailureRecord) -> None:
        wire.send(FailureReport(record))

    try:
        engine = build(
            start.config,
            trace=start.trace,
            output=sys.stderr,
            environ=os.environ,
            progress=_Progress(wire),
            on_failure=report,
        )
    except (ConfigurationError, CheckpointError, TraceFileError) as error:
        wire.send(LoadRefused(str(error), is_usage=isinstance(error, ConfigurationError)))
        return EXIT_REFUSED
    except EngineDeadError as error:
        wire.send(EngineFailed(str(error), error.failure_id or ""))
        return EXIT_FAILED
    try:
        return _serve(engine, wire, inbox)
    finally:
        engine.close()


def _serve(engine: Engine, wire: WireSocket, inbox: queue.SimpleQueue[IntoEngine]) -> int:
    outbox = _Outbox(wire, engine)
    outbox.report()
    wire.send(EngineReady(engine.limits, engine.kv_plan.describe(engine.kv_bytes, engine.kv_dtype.label)))
    try:
        engine.core.run_busy_loop(_Inbox(inbox), outbox)
    except EngineDeadError:
        return EXIT_FAILED
    return 0


class _Wire(WireSocket):
    """Ends the process when the other side is gone."""

    def send(self, message: OutOfEngine) -> None:
        try:
            super().send(message)
        except OSError:
            _exit_orphaned()


class _Inbox:
    """The messages after the first."""

    def __init__(self, inner: queue.SimpleQueue[IntoEngine]) -> None:
        self._inner = inner

    def get(self, block: bool = True) -> EngineMessage:
        message = self._inner.get(block)
        assert not isinstance(message, StartEngine), "an engine is started once"
        return message


class _Outbox:
    """Sends what the core puts out, and now and then what its memory looks like."""

    def __init__(self, wire: WireSocket, engine: Engine) -> None:
        self._wire = wire
        self._engine = engine
        self._reported = 0.0

    def put(self, message: OutputMessage) -> None:
        # The figures first: who has read a request's last token finds the ledger that belongs to it.
        idle = not self._engine.core.has_unfinished_requests
        if time.monotonic() - self._reported >= (_IDLE_REPORT_SECONDS if idle else _REPORT_SECONDS):
            self.report()
        self._wire.send(message)

    def report(self) -> None:
        self._reported = time.monotonic()
        house: MemoryHouse = self._engine.house
        self._wire.send(MemoryReport(house.ledger("serving").to_dict(), house.statistics_dict()))


class _Progress:
    """Tells of the load, not too often."""

    def __init__(self, wire: WireSocket) -> None:
        self._wire = wire
        self._told = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._wire.send(LoadProgress(label, done, total))


def _receive(wire: WireSocket, inbox: queue.SimpleQueue[IntoEngine]) -> None:
    with suppress(OSError):
        for message in wire.messages():
            inbox.put(message)
    _exit_orphaned()


def _exit_orphaned() -> NoReturn:
    """End at once. Nobody is there to whom this process could be of use, and nothing here is worth saving."""
    os._exit(EXIT_ORPHANED)


def _die_with_parent() -> None:
    """Be killed when the thread that started this process ends. The socket's end says so too, but to a thread
    that a call which holds the interpreter's lock keeps from hearing it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(run_engine(int(sys.argv[1]), int(sys.argv[2])))
