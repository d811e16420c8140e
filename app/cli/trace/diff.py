"""``vtserve trace diff``: what one run allocates and another does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.cli.options import WholeNumber
from app.cli.plain_text import aligned, printable

if TYPE_CHECKING:
    from app.trace.diff import Diff, GroupDiff

EPILOG = """\b
Examples:
  vtserve trace diff before.trace after.trace
  vtserve trace diff --ignore-lines release.trace now.trace
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--ignore-lines", is_flag=True, help="Match sites by file: line numbers move with the code.")
@click.option("--full-tags", is_flag=True, help="Gather each layer apart, not model.layers.*.")
@click.option(
    "--top",
    type=WholeNumber(min=0),
    default=20,
    metavar="N",
    show_default=True,
    help="Rows of the table; 0: all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every single change.")
def diff(before: Path, after: Path, ignore_lines: bool, full_tags: bool, top: int, as_json: bool) -> None:
    """Compare two traces by tag, line of code and order, never by address."""
    import msgspec

    from app.trace.diff import compare
    from app.trace.source import open_trace
    from app.trace.summary import layer_pattern
    from app.trace.table import read_table

    tables = []
    for path in (before, after):
        with open_trace(path) as trace:
            tables.append(read_table(trace))
    found = compare(
        *tables,
        tag_name=str if full_tags else layer_pattern,
        site_name=without_line if ignore_lines else str,
    )
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found.to_dict()), indent=2).decode() + "\n")
        return
    for line in diff_lines(found, top):
        sys.stdout.write(printable(line) + "\n")


def without_line(site: str) -> str:
    """The file of a ``file:line``."""
    file, _, line = site.rpartition(":")
    return file if line.isdecimal() else site


def diff_lines(found: Diff, top: int) -> Iterator[str]:
    """The comparison for a person; at most `top` rows, 0: all."""
    from engine.memory.errors import describe_bytes
    from engine.memory.lines import format_line

    for name, side in (("before", found.before), ("after", found.after)):
        if side.failure is not None:
            yield f"{name}: {format_line(side.failure, side.device)}"
    rows = [("", "before", "after", "change")]
    for name in ("requests", "failures"):
        one, other = getattr(found.before, name), getattr(found.after, name)
        rows.append((name, f"{one:,}", f"{other:,}", f"{other - one:+,}" if other != one else "-"))
    for name in ("allocated", "peak", "live"):
        one, other = getattr(found.before, name), getattr(found.after, name)
        rows.append((name, describe_bytes(one), describe_bytes(other), _signed(other - one)))
    yield from aligned(rows)
    if found.before.missing or found.after.missing:
        yield (
            f"records are missing, {found.before.missing:,} before and {found.after.missing:,} after: "
            "allocations are counted from where each trace begins"
        )
    yield ""
    if not found.groups:
        yield f"all {found.same:,} allocations are the same"
        return
    yield f"{found.same:,} allocations are the same, {len(found.changes):,} differ"
    yield ""
    shown = found.groups if not top else found.groups[:top]
    headings = ("tag", "site", "before", "after", "new", "gone", "grew", "shrank", "kept", "freed", "bytes")
    yield from aligned([headings, *map(_row, shown)], left=2)
    if len(shown) < len(found.groups):
        yield f"and {len(found.groups) - len(shown)} more (--top 0)"


def _row(group: GroupDiff) -> tuple[str, ...]:
    counts = (group.appeared, group.vanished, group.grew, group.shrank, group.kept, group.released)
    return (
        printable(group.tag) or "?",
        printable(group.site) or "?",
        f"{group.before:,}",
        f"{group.after:,}",
        *(f"{count:,}" if count else "-" for count in counts),
        _signed(group.difference),
    )


def _signed(count: int) -> str:
    from engine.memory.errors import describe_bytes

    return "-" if not count else f"{'+' if count > 0 else ''}{describe_bytes(count)}"
