"""``vtserve trace import``: another program's trace as one that all verbs take."""

from __future__ import annotations

from pathlib import Path

import click

from app.cli.options import WholeNumber
from app.cli.trace.output import output_file

EPILOG = """\b
Examples:
  vtserve trace import --out torch.ndjson snapshot.pickle
  vtserve trace import server.log | vtserve trace summary -
"""


@click.command("import", epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["torch-snapshot", "log"]),
    help="A torch memory snapshot, or a log with [cuda-alloc] lines; found out if left out.",
)
@click.option("--device", type=WholeNumber(min=0), metavar="N", help="Which device of a snapshot.")
@click.option("--segments", is_flag=True, help="Of a snapshot, what torch asked of the driver.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to; standard output if left out.",
)
def import_(file: Path, form: str | None, device: int | None, segments: bool, out: Path | None) -> None:
    """Write a torch memory snapshot or a log as JSON lines, which every verb takes."""
    from app.trace.importers import import_trace
    from app.trace.ndjson import encode

    with (
        import_trace(file, form, device=device, segments=segments) as (header, events),
        output_file(out) as to,
    ):
        for piece in encode(events, header):
            to.write(piece)
