"""``vtserve serve``: an OpenAI-compatible server over an engine in a process of its own."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from app.cli.options import (
    ByteSize,
    Flag,
    HelpfulCommand,
    Number,
    WholeNumber,
    engine_flags,
    failure_flags,
    flag_group,
    model_flags,
    trace_flags,
)
from app.cli.planning import plan_flags, refuse_what_does_not_fit

DEMO_MODEL = "SmolLM2-135M-Instruct"

EPILOG = """\b
Example:
  vtserve serve path/to/checkpoint --kv-cache-memory 2GiB --alloc-trace
"""

SERVER = "Server"
SUPERVISION = "Engine process"

server_flags = flag_group(
    "server",
    [
        Flag(
            ["--host"],
            group=SERVER,
            common=True,
            metavar="NAME",
            default="127.0.0.1",
            help="Address to listen on.",
        ),
        Flag(
            ["--port"],
            group=SERVER,
            common=True,
            type=WholeNumber(0, 65_535),
            metavar="N",
            default=8000,
            help="0: any free one.",
        ),
        Flag(
            ["--api-key"],
            group=SERVER,
            common=True,
            multiple=True,
            metavar="KEY",
            help="Ask for this key; repeatable. Also VTSERVE_API_KEY.",
        ),
        Flag(
            ["--api-key-file"],
            group=SERVER,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Ask for one of these keys, one a line.",
        ),
        Flag(
            ["--require-api-key"],
            group=SERVER,
            is_flag=True,
            help="Do not start without a key.",
        ),
        Flag(
            ["--served-model-name"],
            group=SERVER,
            common=True,
            multiple=True,
            metavar="NAME",
            default_text="MODEL",
            help="Name of the model for clients; repeatable.",
        ),
        Flag(
            ["--max-body-size"],
            group=SERVER,
            type=ByteSize(),
            default=16 << 20,
            default_text="16MiB",
            help="Largest body of a request.",
        ),
        Flag(
            ["--shutdown-timeout"],
            group=SERVER,
            type=Number(min=0),
            metavar="S",
            default=30.0,
            help="Seconds for requests under way at SIGTERM.",
        ),
        Flag(
            ["--access-log/--no-access-log"],
            group=SERVER,
            default=False,
            default_text="off",
            help="Log every request.",
        ),
    ],
)

supervision_flags = flag_group(
    "supervision",
    [
        Flag(
            ["--max-queued-requests"],
            group=SUPERVISION,
            type=WholeNumber(min=0),
            metavar="N",
            default=1024,
            help="Sequences that may wait; more get 429.",
        ),
        Flag(
            ["--max-engine-restarts"],
            group=SUPERVISION,
            type=WholeNumber(min=0),
            metavar="N",
            default=3,
            help="How often an engine that died is started again.",
        ),
        Flag(
            ["--engine-timeout"],
            group=SUPERVISION,
            type=Number(min=0, min_open=True),
            metavar="S",
            default=300.0,
            help="Seconds without a finished step after which an engine with work hangs.",
        ),
        Flag(
            ["--scheduling-policy"],
            group=SUPERVISION,
            type=click.Choice(["fcfs", "priority"]),
            default="fcfs",
            help="priority: heed the requests' priority, lower first.",
        ),
        Flag(
            ["--max-logprobs"],
            group=SUPERVISION,
            type=WholeNumber(min=0),
            metavar="K",
            default=20,
            help="Most log probabilities at each position.",
        ),
        Flag(
            ["--max-logits-rows"],
            group=SUPERVISION,
            type=WholeNumber(min=1),
            metavar="N",
            default_text="--max-num-seqs",
            help="Rows of logits in a step; prompt log probabilities take one a token.",
        ),
        Flag(
            ["--seed"],
            group=SUPERVISION,
            type=WholeNumber(min=0, max=2**63 - 1),
            metavar="N",
            help="Of requests without one.",
        ),
    ],
)


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@click.argument("model_argument", metavar="[MODEL]", required=False)
@server_flags
@model_flags
@engine_flags
@supervision_flags
@trace_flags
@failure_flags
@plan_flags
def serve(
    model_argument: str | None,
    server: dict[str, Any],
    model: dict[str, Any],
    engine: dict[str, Any],
    supervision: dict[str, Any],
    trace: dict[str, Any],
    failure: dict[str, Any],
    planning: dict[str, Any],
) -> None:
    """Serve MODEL (a checkpoint directory or a Hub id) over HTTP, in OpenAI's protocol."""
    from app.security import is_loopback, read_api_keys
    from app.settings import trace_settings
    from engine.errors import ConfigurationError

    if model_argument is not None and model["model"] not in (None, model_argument):
        raise click.UsageError(f"MODEL is {model_argument}, --model is {model['model']}: give one.")
    if trace["alloc_stats"] is None and not os.environ.get("VT_CUDA_ALLOC_STATS"):
        # A server counts: its /metrics tell bytes by tag, and a step allocates nothing that would be slower.
        trace = {**trace, "alloc_stats": True}
    settings = trace_settings(os.environ, trace)
    keys = read_api_keys(server["api_key"], server["api_key_file"], os.environ)
    if server["require_api_key"] and not keys:
        raise ConfigurationError(
            "--require-api-key: there is no key: set VTSERVE_API_KEY, or give --api-key or --api-key-file"
        )

    import anyio
    import msgspec

    from app.cli.progress import ProgressBar
    from app.demo_model import ensure_demo_model
    from app.engine_client import ClientSettings
    from app.engine_process import EngineCommand
    from app.run_server import ServeSettings, run_server
    from app.server import ServerSettings
    from app.serving import bind
    from engine.config import EngineConfig
    from engine.model.checkpoint import resolve_model

    wanted = model_argument or model.pop("model")
    model.pop("model", None)
    client = ClientSettings(
        max_restarts=supervision.pop("max_engine_restarts"),
        engine_timeout=supervision.pop("engine_timeout"),
        max_queued=supervision.pop("max_queued_requests"),
        command=click.get_current_context().find_object(EngineCommand) or EngineCommand(),
    )
    config = EngineConfig.from_flags(model=wanted or DEMO_MODEL, **model, **engine, **supervision, **failure)
    names = server["served_model_name"] or [wanted or DEMO_MODEL]
    # A port that is taken is known before a model is fetched.
    listener = bind(server["host"], server["port"])
    with listener, ProgressBar(sys.stderr, as_lines=settings.trace) as progress:
        path = ensure_demo_model(progress) if wanted is None else None
        # What does not fit need not be fetched.
        refuse_what_does_not_fit(msgspec.structs.replace(config, model=str(path or wanted)), planning)
        path = path or resolve_model(wanted)

        def say(line: str) -> None:
            with suppress(OSError):  # whoever read standard error may have gone; clients have not
                click.echo(line, err=True)

        serving = ServeSettings(
            engine=msgspec.structs.replace(config, model=str(path)),
            trace=settings,
            model_names=names,
            server=ServerSettings(keys, is_loopback(server["host"]), server["max_body_size"]),
            client=client,
            shutdown_timeout=server["shutdown_timeout"],
            access_log=server["access_log"],
        )

        async def main() -> int:
            return await run_server(
                serving, listener, environ=os.environ, output=sys.stderr, say=say, progress=progress
            )

        status = anyio.run(main)
    click.get_current_context().exit(status)
