"""One engine process, from the side that watches it: started, spoken to, asked for its stacks, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio.abc import SocketStream

import engine
from engine.wire import IntoEngine, OutOfEngine, StartEngine, encode_frame, from_engine

__all__ = ["EngineCommand", "EngineProcess", "describe_exit"]


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What starts an engine's process. The descriptors of its socket and of its stacks' file follow.

    ``-P``: a folder called ``engine`` where the server was started is not ours.
    """

    arguments: Sequence[str] = (sys.executable, "-P", "-m", "engine.process")


_STACK_SECONDS = 2.0
_STACK_POLL_SECONDS = 0.05
_RECEIVE_BYTES = 1 << 18


class EngineProcess:
    """A child that runs `engine.process`. Made by `start`; `end` must be awaited.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, process: anyio.abc.Process, stream: SocketStream, stacks: int) -> None:
        self._process = process
        self._stream = stream
        self._stacks = stacks
        self._outgoing: deque[IntoEngine] = deque()
        self._wake = anyio.Event()
        self.pid = process.pid

    @classmethod
    async def start(
        cls, message: StartEngine, *, command: EngineCommand, environ: Mapping[str, str]
    ) -> EngineProcess:
        """Start a child and send it `message`.

        Raises
        ------
        OSError
            There is no process to be had.
        """
        ours, theirs = socket.socketpair()
        # On stderr a stack dump would be lost to the record.
        stacks = _anonymous_file()
        try:
            with theirs:
                process = await anyio.open_process(
                    [*command.arguments, str(theirs.fileno()), str(stacks)],
                    stdin=subprocess.DEVNULL,
                    stdout=_descriptor(sys.stderr),
                    stderr=None,
                    env={**environ, "PYTHONPATH": _python_path(environ)},
                    pass_fds=[theirs.fileno(), stacks],
                )
        except BaseException:
            ours.close()
            os.close(stacks)
            raise
        ours.setblocking(False)
        child = cls(process, await SocketStream.from_socket(ours), stacks)
        child.send(message)
        return child

    def send(self, message: IntoEngine) -> None:
        """Queue `message`. Does not wait: how much may be queued is for the caller to bound."""
        self._outgoing.append(message)
        self._wake.set()

    async def write(self) -> None:
        """Send what is queued, for as long as there is an engine."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                while self._outgoing:
                    frames = []
                    while self._outgoing:
                        frames.append(encode_frame(self._outgoing.popleft()))
                    await self._stream.send(b"".join(frames))
                await self._wake.wait()
                self._wake = anyio.Event()

    async def messages(self) -> AsyncIterator[OutOfEngine]:
        """What the engine sends, until its end of the socket closes.

        Raises
        ------
        msgspec.DecodeError
            It is no message.
        """
        decoder = from_engine()
        while True:
            try:
                data = await self._stream.receive(_RECEIVE_BYTES)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
            for message in decoder.feed(data):
                yield message

    async def stacks(self) -> list[str]:
        """The stacks of all its threads, as faulthandler writes them; empty if it cannot tell any more."""
        self._signal(signal.SIGUSR1)
        size = 0
        with anyio.move_on_after(_STACK_SECONDS):
            while True:
                await anyio.sleep(_STACK_POLL_SECONDS)
                before, size = size, os.fstat(self._stacks).st_size
                if size and size == before:
                    break
        return os.pread(self._stacks, size, 0).decode(errors="replace").splitlines()

    async def end(self, patience: float = 0.0) -> int:
        """Wait `patience` seconds for the process to end, then kill it. Returns its status.

        It has ended when this returns, cancelled or not.
        """
        with anyio.CancelScope(shield=True):
            if patience > 0:
                with anyio.move_on_after(patience):
                    await self._process.wait()
            self._signal(signal.SIGKILL)
            status = await self._process.wait()
            await self._stream.aclose()
            with suppress(OSError):
                os.close(self._stacks)
            self._stacks = -1
        return status

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def describe_exit(status: int) -> str:
    """``was killed by SIGKILL``, ``exited with status 1``"""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _python_path(environ: Mapping[str, str]) -> str:
    """Where the child finds the packages of this process, installed or not."""
    root = str(Path(engine.__file__).parent.parent)
    return os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vtserve-stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _descriptor(stream: Any) -> int | None:
    """Of what `stream` writes to; None if it is no file."""
    try:
        descriptor: int = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return descriptor
