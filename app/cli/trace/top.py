"""``vtserve trace top``: the memory in a terminal, as it changes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from app.cli.options import Flag, HelpfulCommand, Number

EPILOG = """\b
Examples:
  vtserve trace top engine.trace
  vtserve trace top http://127.0.0.1:8000
"""


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@click.argument("source", metavar="FILE|URL", default="http://127.0.0.1:8000")
@click.option(
    "--interval",
    cls=Flag,
    group="View",
    common=True,
    type=Number(min=0.05),
    metavar="S",
    default=1.0,
    help="Seconds between looks.",
)
@click.option("--once", cls=Flag, group="View", common=True, is_flag=True, help="Look once and end.")
@click.option("--api-key", cls=Flag, group="View", common=True, metavar="KEY", help="Also VTSERVE_API_KEY.")
def top(source: str, interval: float, once: bool, api_key: str | None) -> None:
    """Show where the bytes are, the last lines, requests and tokens: of a recorder's FILE, or a server's URL.

    Where standard output is no terminal, one look is written. Ctrl-C ends.
    """
    from rich.console import Console
    from rich.live import Live

    from app.open_ai import client_key
    from app.trace.top import FileTop, ServerTop, TopSource, render

    is_url = source.startswith(("http://", "https://"))
    seen: TopSource = ServerTop(source, client_key(api_key, os.environ)) if is_url else FileTop(Path(source))
    console = Console()
    try:
        if once or not console.is_terminal:
            console.print(render(seen.look(), height=10_000 if once else 40), soft_wrap=False)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(render(seen.look(), height=console.height), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    finally:
        seen.close()
