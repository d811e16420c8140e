"""The composition root of the control plane: the engine's process, and the application over it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from app.closing import OpenStreams
from app.engine_client import ClientSettings, EngineClient
from app.metrics import ServerMetrics
from app.routes.debug import debug_router
from app.routes.memory_page import memory_page_router
from app.server import ServerSettings, create_app
from app.service import Service
from app.serving import serve, url_of
from engine.config import EngineConfig
from engine.memory.settings import TraceSettings
from engine.model.tokenizer import Tokenizer

__all__ = ["ServeSettings", "run_server"]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything that ``vtserve serve`` was told."""

    engine: EngineConfig
    """`model` is a directory"""
    trace: TraceSettings
    model_names: Sequence[str]
    server: ServerSettings
    client: ClientSettings = field(default_factory=ClientSettings)
    shutdown_timeout: float = 30.0
    """seconds that requests under way are given when the server is told to stop"""
    access_log: bool = False


async def run_server(
    settings: ServeSettings,
    listener: socket.socket,
    *,
    environ: Mapping[str, str],
    output: TextIO,
    say: Callable[[str], None],
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Serve on `listener` until told to stop, or until no engine can be had.

    Parameters
    ----------
    output
        Takes ``engine-fatal`` lines.
    say
        Takes lines for a person.
    progress
        Told of each load, tensor by tensor.

    Returns
    -------
    int
        0 after a signal; 1 if no engine can be had, 2 if that is for a flag; 128 and the signal's number when
        a second one cut things short.

    Raises
    ------
    CheckpointError
        The tokenizer cannot be read.
    """
    tokenizer = Tokenizer.open(settings.engine.model)
    client = EngineClient(
        settings.engine,
        settings.trace,
        tokenizer,
        settings.client,
        environ=environ,
        output=output,
        say=say,
        progress=progress,
    )
    service = Service(
        client,
        ServerMetrics(client, settings.model_names[0]),
        settings.model_names,
        priority_scheduling=settings.engine.scheduling_policy == "priority",
    )
    streams = OpenStreams()
    app = create_app(
        service, settings.server, debug_routers=[debug_router(client), memory_page_router()], streams=streams
    )
    async with client.running():
        say(f"listening on {url_of(listener)}; the engine is loading {settings.model_names[0]}")
        status = await serve(
            app,
            listener,
            service,
            streams,
            drain=client.drain,
            exhausted=client.exhausted,
            shutdown_timeout=settings.shutdown_timeout,
            say=say,
            access_log=settings.access_log,
        )
        if status >= 128:
            client.hurry()
    if client.refusal is not None:
        say(f"Error: {client.refusal.text}")
        return 2 if client.refusal.is_usage else 1
    if status == 1 and (failure := client.failures.last) is not None:
        where = failure.path or failure.id
        say(f"Error: the engine stopped and is not started again; failure record: {where}")
    return status
