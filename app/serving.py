"""Runs the application on a socket until it is told to stop, and stops in order.

The first SIGTERM or SIGINT closes the socket and lets what is under way end, for `shutdown_timeout` seconds;
what is left then ends with an error. The second stops at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import anyio
import uvicorn

from app.closing import OpenStreams
from app.service import Service
from engine.errors import ConfigurationError

__all__ = ["bind", "serve", "url_of"]

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_FLUSH_SECONDS = 5.0
"""for clients to read the ends of their responses"""
_CLEAN_UP_SECONDS = 1.0
_SECONDS_BETWEEN_WARNINGS = 10.0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`; 0 is any free port.

    Raises
    ------
    ConfigurationError
        There is no such address, or it is taken.
    """
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigurationError(f"--host {host}: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        value = port if flag == "--port" else host
        raise ConfigurationError(f"{flag} {value}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser finds what listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: Callable[..., Any],
    listener: socket.socket,
    service: Service,
    streams: OpenStreams,
    *,
    drain: Callable[[float], Awaitable[None]],
    exhausted: anyio.Event,
    shutdown_timeout: float,
    say: Callable[[str], None],
    access_log: bool = False,
) -> int:
    """Serve `app` on `listener` until a signal, or until the engine is `exhausted`.

    Parameters
    ----------
    drain
        Waits so many seconds for the engine's requests to end, then ends them with an error.
    say
        Takes lines for a person.

    Returns
    -------
    int
        The status to exit with: 0 after a signal, 1 without an engine, 128 and the signal's number when a
        second one cut things short.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config)
    status = 0

    async def stop(seconds: float) -> None:
        service.stopping = True
        server.should_exit = True
        streams.close()
        await drain(seconds)
        await anyio.sleep(_FLUSH_SECONDS)
        server.force_exit = True

    async def watch_signals() -> None:
        nonlocal status
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if service.stopping:
                    say(f"{number.name} again: stopping at once")
                    status = 128 + number
                    everything.cancel_scope.cancel()
                    return
                say(f"{number.name}: no new requests; waiting {shutdown_timeout:g} s for those under way")
                everything.start_soon(stop, shutdown_timeout)

    async def watch_engine() -> None:
        nonlocal status
        await exhausted.wait()
        if not service.stopping:
            status = 1
            await stop(0)

    asyncio.get_running_loop().set_exception_handler(_QuietAccept())
    with _quiet_cancellation():
        async with anyio.create_task_group() as everything:
            everything.start_soon(watch_signals)
            everything.start_soon(watch_engine)
            await server.serve(sockets=[listener])
            everything.cancel_scope.cancel()
        await _end_requests(server)
    return status


class _Server(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _end_requests(server: uvicorn.Server) -> None:
    """Cancel what is still under way, and let it clean up."""
    tasks = server.server_state.tasks
    for task in tasks:
        task.cancel()
    with anyio.move_on_after(_CLEAN_UP_SECONDS):
        while tasks:
            await anyio.sleep(0.01)


class _QuietAccept:
    """Takes what asyncio finds wrong outside of tasks.

    Out of descriptors it is told so for every connection that waits, each second, with a traceback; here that
    is a line now and then. A second later asyncio listens again, also on a socket that was closed meanwhile.
    """

    def __init__(self) -> None:
        self._told = -_SECONDS_BETWEEN_WARNINGS
        self._ran_out = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._ran_out and isinstance(error, ValueError) and "file descriptor" in str(error):
            return
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
            return
        self._ran_out = True
        if loop.time() - self._told >= _SECONDS_BETWEEN_WARNINGS:
            self._told = loop.time()
            _log.warning("no connection can be accepted: %s (ulimit -n)", error.strerror)


@contextmanager
def _quiet_cancellation() -> Generator[None, None, None]:
    """uvicorn logs a request that was cancelled as a fault with its traceback; here it is meant."""

    def is_fault(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, anyio.get_cancelled_exc_class())

    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(is_fault)
    try:
        yield
    finally:
        logger.removeFilter(is_fault)
