"""``vtserve trace export``: a trace in another program's format."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from app.cli.trace.output import output_file
from app.trace.exporters import EXPORTERS
from engine.errors import ConfigurationError

EPILOG = """\b
Examples:
  vtserve trace export --format perfetto --out engine.pftrace engine.trace
  vtserve trace export --format torch-snapshot --out s.pickle engine.trace
  vtserve trace export --format pprof engine.trace > engine.pb.gz
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(list(EXPORTERS)),
    required=True,
    metavar="FORMAT",
    help="One of " + ", ".join(EXPORTERS) + ".",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to; standard output if left out.",
)
def export(file: Path, form: str, out: Path | None) -> None:
    """Write a trace in another program's format."""
    from app.trace.source import open_trace

    exporter = EXPORTERS[form]
    if (
        out is None
        and sys.stdout.isatty()
        and not exporter.media_type.startswith(("text/", "application/x-"))
    ):
        raise ConfigurationError(
            f"--format {form} is binary: give --out FILE, or send standard output to a file"
        )
    with open_trace(file) as trace:
        pieces = exporter.encode(trace.events(), trace.header)
        with output_file(out) as stream:
            for piece in pieces:
                stream.write(piece)
