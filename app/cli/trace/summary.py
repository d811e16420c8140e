"""``vtserve trace summary``: what a trace says, the failure first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.cli.options import WholeNumber
from app.cli.plain_text import aligned, printable

if TYPE_CHECKING:
    from app.trace.summary import Group, Summary

EPILOG = """\b
Examples:
  vtserve trace summary engine.trace
  vtserve trace summary --json engine.trace | jq .failure
  curl -s localhost:8000/debug/alloc/export | vtserve trace summary -
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--top",
    type=WholeNumber(min=0),
    default=15,
    metavar="N",
    show_default=True,
    help="Rows of each table; 0: all.",
)
@click.option("--full-tags", is_flag=True, help="Count each layer apart, not model.layers.*.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def summary(file: Path, top: int, full_tags: bool, as_json: bool) -> None:
    """Tell what failed, who asked for how much, and who was live at the peak."""
    import msgspec

    from app.trace.source import open_trace
    from app.trace.summary import layer_pattern, summarize
    from app.trace.table import read_table

    with open_trace(file) as trace:
        table = read_table(trace)
    found = summarize(table, name_of=str if full_tags else layer_pattern, blocks=top or len(table))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found.to_dict()), indent=2).decode() + "\n")
        return
    for line in summary_lines(found, top):
        sys.stdout.write(printable(line) + "\n")


def summary_lines(found: Summary, top: int) -> Iterator[str]:
    """The summary for a person; at most `top` rows a table, 0: all."""
    from engine.memory.causes import CAUSES
    from engine.memory.errors import describe_bytes
    from engine.memory.lines import format_line

    device = found.header.device
    if found.failure is not None:
        yield format_line(found.failure, device)
        if found.failure.why is not None:
            yield f"{found.failure.why.value}: {CAUSES[found.failure.why]}"
        if found.failures > 1:
            yield f"{found.failures} requests failed; this was the last"
        yield ""
    for event in found.pending[-5:]:
        yield format_line(event, device)
    if found.pending:
        yield f"{len(found.pending)} requests without an outcome: running, or the process ended in them"
        yield ""
    yield from _facts(found)
    if found.by_tag:
        yield ""
        yield from _table("by tag", found.by_tag, found.total, top)
        yield ""
        yield from _table("by site", found.by_site, None, top)
    if found.at_peak:
        yield ""
        yield f"live at the peak, {describe_bytes(found.peak)}"
        rows = [
            (
                f"  {describe_bytes(block.size)}",
                f"#{block.sequence}",
                printable(block.tag),
                printable(block.site),
            )
            for block in found.at_peak
        ]
        yield from aligned(rows, left=4)
        rest = found.peak - found.at_peak_unknown - sum(block.size for block in found.at_peak)
        if rest > 0:
            yield f"  {describe_bytes(rest)} in smaller blocks"
        if found.at_peak_unknown > 0:
            yield f"  {describe_bytes(found.at_peak_unknown)} from before the trace begins"


def _facts(found: Summary) -> Iterator[str]:
    from engine.memory.errors import describe_bytes

    header = found.header
    size = f" of {describe_bytes(header.total)}" if header.total else ""
    state = f"; {found.state}" if found.state else ""
    yield f"device {header.device}{size}, api {header.api}{state}"
    over = f" in {describe_duration(found.duration)}" if found.duration else ""
    missing = f", {found.missing:,} more were overwritten or are damaged" if found.missing else ""
    yield f"{found.records:,} records{over}{missing}"
    at = f" at #{found.peak_sequence}" if found.peak_sequence else ""
    before = f", {describe_bytes(found.before)} before the trace begins" if found.before else ""
    yield f"peak {describe_bytes(found.peak)}{at}, {describe_bytes(found.live)} live at the end{before}"
    if found.bypassed:
        yield f"{describe_bytes(found.bypassed)} went past the allocator"


_HEADINGS = ("count", "frees", "failed", "allocated", "largest", "live", "at peak", "lifetime", "longest")


def _table(title: str, groups: Sequence[Group], total: Group | None, top: int) -> Iterator[str]:
    shown = groups if not top else groups[:top]
    rows = [(title, *_HEADINGS), *map(_row, shown)]
    if total is not None:
        rows.append(_row(total))
    yield from aligned(rows)
    if len(shown) < len(groups):
        yield f"and {len(groups) - len(shown)} more (--top 0)"


def _row(group: Group) -> tuple[str, ...]:
    from engine.memory.errors import describe_bytes

    counts = (group.allocations, group.frees, group.failures)
    sizes = (group.allocated, group.largest, group.live, group.at_peak)
    times = (group.median_lifetime, group.longest_lifetime)
    return (
        printable(group.name) or "?",
        *(f"{count:,}" for count in counts),
        *map(describe_bytes, sizes),
        *("-" if time is None else describe_duration(time) for time in times),
    )


def describe_duration(ns: int) -> str:
    """`ns` nanoseconds for a person: ``3.2 µs``, ``41.0 ms``, ``12.5 s``, ``2 h 05 min``."""
    if ns < 1_000_000:
        return f"{ns / 1e3:.1f} µs"
    if ns < 1_000_000_000:
        return f"{ns / 1e6:.1f} ms"
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
