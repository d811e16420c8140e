"""``vtserve trace VERB``: tools over a recorded memory trace. One module a verb."""

from __future__ import annotations

import click

from app.cli.group import CommandGroup, LazyCommand

VERBS = {
    "show": LazyCommand("app.cli.trace.show:show", "Print the lines of a trace."),
    "summary": LazyCommand("app.cli.trace.summary:summary", "Who asked for how much; the failure first."),
    "top": LazyCommand("app.cli.trace.top:top", "Show the memory as it changes, of a file or a server."),
    "diff": LazyCommand("app.cli.trace.diff:diff", "What one run allocates and another does not."),
    "replay": LazyCommand("app.cli.trace.replay:replay", "The same requests to simulated allocators."),
    "export": LazyCommand("app.cli.trace.export:export", "Write a trace for Perfetto, torch, RMM or pprof."),
    "import": LazyCommand("app.cli.trace.import_:import_", "Read a torch memory snapshot, or a log."),
}

EPILOG = """\b
Examples:
  vtserve trace summary engine.trace
  vtserve trace show --follow --kind failed engine.trace
"""


@click.group(
    cls=CommandGroup,
    lazy_commands=VERBS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def trace() -> None:
    """Read, compare, replay and convert memory traces.

    A trace is a flight recorder's file or JSON lines; - is standard input.
    """
