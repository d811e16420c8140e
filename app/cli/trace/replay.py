"""``vtserve trace replay``: a trace's requests against simulated allocators."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.cli.options import ByteSize
from app.cli.plain_text import aligned, printable

if TYPE_CHECKING:
    from app.trace.replay import Replay

EPILOG = """\b
Exit status 3: a request that succeeded in the trace fails.
\b
Examples:
  vtserve trace replay engine.trace
  vtserve trace replay --allocator pool --capacity 22GiB engine.trace
"""

_FAILED = 3
_ENDLESS = 1 << 62


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--allocator",
    "allocators",
    type=click.Choice(["malloc", "pool", "slab"]),
    multiple=True,
    help="cudaMalloc, a stream-ordered pool, slabs for tensors under 1 MiB; all if left out.",
)
@click.option(
    "--capacity", type=ByteSize(), metavar="SIZE", help="Bytes that may be taken; no limit if left out."
)
@click.option(
    "--granularity", type=ByteSize(), metavar="SIZE", help="Step it is taken in: 2MiB, the pool's 32MiB."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(
    file: Path, allocators: tuple[str, ...], capacity: int | None, granularity: int | None, as_json: bool
) -> None:
    """Make a trace's requests to simulated allocators: what they take, and what fails."""
    import msgspec

    from app.trace.allocators import ALLOCATORS
    from app.trace.replay import replay as replay_table
    from app.trace.source import open_trace
    from app.trace.table import read_table
    from engine.errors import ConfigurationError

    with open_trace(file) as trace:
        table = read_table(trace)
    found = []
    for name in dict.fromkeys(allocators) or ALLOCATORS:
        try:
            allocator = ALLOCATORS[name](_ENDLESS if capacity is None else capacity, granularity)
        except ValueError as error:
            raise ConfigurationError(f"--granularity: {error}") from None
        found.append(replay_table(table, allocator))
    if as_json:
        facts = [entry.to_dict() | {"capacity": capacity} for entry in found]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode() + "\n")
    else:
        for line in replay_lines(found, capacity):
            sys.stdout.write(printable(line) + "\n")
    if any(entry.failures for entry in found):
        sys.stdout.flush()
        click.get_current_context().exit(_FAILED)


def replay_lines(found: Sequence[Replay], capacity: int | None) -> Iterator[str]:
    """The results for a person."""
    from engine.memory.errors import describe_bytes

    first = found[0]
    limit = "no limit" if capacity is None else f"a capacity of {describe_bytes(capacity)}"
    yield f"{first.requests:,} requests and {first.frees:,} frees, {limit}"
    if first.before:
        yield f"{describe_bytes(first.before)} are older than the trace: the replay begins with them"
    peak = first.live_peak
    if len({entry.live_peak for entry in found}) == 1 or not any(entry.failures for entry in found):
        yield f"most asked for at once: {describe_bytes(peak.requested)} at #{peak.sequence}"
    yield ""
    headings = (
        "allocator",
        "steps",
        "most taken",
        "at",
        "asked for",
        "rounding",
        "unused",
        "fragmented",
        "failed",
    )
    rows = [headings]
    for entry in found:
        moment = entry.reserved_peak
        rows.append(
            (
                entry.allocator,
                describe_bytes(entry.granularity),
                describe_bytes(moment.reserved),
                f"#{moment.sequence}",
                describe_bytes(moment.requested),
                describe_bytes(moment.rounding),
                describe_bytes(moment.unused),
                f"{moment.fragmentation:.1%}",
                f"{entry.failures:,}",
            )
        )
    yield from aligned(rows)
    for entry in found:
        failure = entry.first_failure
        if failure is not None:
            yield ""
            site = f" site={failure.site}" if failure.site else ""
            yield (
                f"{entry.allocator}: FAILED #{failure.sequence} size={describe_bytes(failure.size)} "
                f"why={failure.why.value} tag={failure.tag}{site}: {describe_bytes(failure.free)} are free, "
                f"{describe_bytes(failure.largest)} in one piece"
            )
    if first.failed_in_trace:
        yield ""
        for entry in found:
            yield (
                f"{entry.allocator}: of {entry.failed_in_trace:,} requests that failed in the trace "
                f"{entry.fit_here:,} would succeed"
            )
