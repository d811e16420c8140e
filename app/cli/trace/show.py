"""``vtserve trace show``: print the lines of a trace."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.cli.options import ByteSize, WholeNumber
from app.cli.plain_text import printable
from app.trace_filter import KINDS, TraceFilter, event_json
from engine.errors import ConfigurationError
from engine.memory.lines import format_line

if TYPE_CHECKING:
    from app.trace.source import Trace
    from engine.memory.record import TraceEvent

EPILOG = """\b
Examples:
  vtserve trace show --last 50 engine.trace
  vtserve trace show --tag 'weights/*.down_proj' --min-size 16MiB engine.trace
  vtserve trace show --follow --kind failed,pending engine.trace
"""


class Kinds(click.ParamType[frozenset[str]]):
    """Kinds of records by commas."""

    name = "kinds"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> frozenset[str]:
        if isinstance(value, frozenset):
            return value
        names = [name.strip() for name in str(value).split(",") if name.strip()]
        for name in names:
            if name not in KINDS:
                self.fail(f"{name!r} is none of {', '.join(KINDS)}.", param, ctx)
        return frozenset(names)


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--last", type=WholeNumber(min=1), metavar="N", help="Only the newest N of those chosen.")
@click.option("--min-size", type=ByteSize(), default=0, metavar="SIZE", help="Only sizes from SIZE on.")
@click.option("--tag", default="", metavar="TAG", help="Only tags that begin so, or match a pattern with *.")
@click.option("--kind", type=Kinds(), default=frozenset(), metavar="KIND,…", help=f"Of {', '.join(KINDS)}.")
@click.option("-f", "--follow", is_flag=True, help="Go on as the trace grows, until its writer ends.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def show(
    file: Path, last: int | None, min_size: int, tag: str, kind: frozenset[str], follow: bool, as_json: bool
) -> None:
    """Print the lines of a trace, the oldest first."""
    from app.trace.follow import follow_trace
    from app.trace.source import RecorderTrace, open_trace

    chosen = TraceFilter(min_size, tag, kind)
    with open_trace(file) as trace:
        device = trace.header.device

        def write(event: TraceEvent) -> None:
            if as_json:
                sys.stdout.write(event_json(event).decode() + "\n")
            else:
                sys.stdout.write(printable(format_line(event, device)) + "\n")

        if not follow:
            for event in _chosen(trace, chosen, last):
                write(event)
            return
        if not isinstance(trace, RecorderTrace):
            raise ConfigurationError(f"--follow {file}: only a flight recorder's file can be followed")
        for events in follow_trace(trace, last):
            for event in events:
                if chosen.passes(event):
                    write(event)
            sys.stdout.flush()
        click.echo(trace.state, err=True)


def _chosen(trace: Trace, chosen: TraceFilter, last: int | None) -> Iterator[TraceEvent]:
    found = (event for event in trace.events() if chosen.passes(event))
    return found if last is None else iter(deque(found, maxlen=last))
