"""Loads that would not fit are refused before they begin."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from app.cli.group import Failure
from app.cli.options import Flag, flag_group
from engine.config import EngineConfig
from engine.errors import VtserveError

if TYPE_CHECKING:
    from engine.failure_record import FailureRecord
    from engine.planning.plan import LoadPlan

__all__ = ["plan_flags", "refuse_what_does_not_fit"]

_log = logging.getLogger(__name__)

plan_flags = flag_group(
    "planning",
    [
        Flag(
            ["--plan/--no-plan", "plan_first"],
            group="Memory",
            default=True,
            default_text="on",
            help="Refuse before loading what would not fit.",
        ),
    ],
)


def refuse_what_does_not_fit(
    config: EngineConfig, planning: dict[str, Any], *, say: Callable[[str], None] | None = None
) -> None:
    """Plan the load of `config`, and end the command if it would run out of memory.

    Parameters
    ----------
    planning
        The values of `plan_flags`.
    say
        Takes the lines that explain it; None: standard error.

    Raises
    ------
    Failure
        It does not fit: status 1, as for a load that fails.
    ConfigurationError, CheckpointError
        A flag or the checkpoint cannot be used.
    """
    if not planning["plan_first"]:
        return
    from app.cli.plan_text import refusal_lines
    from engine.failure import summarize_error
    from engine.planning.model import plan_load

    try:
        plan = plan_load(config)
    except VtserveError:
        raise
    except Exception as error:
        # A plan that goes wrong must not keep a model from being served.
        _log.warning("the load could not be planned: %s", summarize_error(error))
        return
    if not plan.fits:
        for line in refusal_lines(plan):
            (say or _say)(line)
        record = _record(config, plan)
        raise Failure(
            "nothing was loaded: it does not fit, as planned; --no-plan loads it all the same; "
            f"failure record: {record.path or record.id}",
            1,
        )


def _record(config: EngineConfig, plan: LoadPlan) -> FailureRecord:
    """The failure record of a load that was refused: what would have been live, and whose it would be."""
    from engine.failure import FailureReporter, failure_directory

    assert plan.failure is not None
    reporter = FailureReporter(failure_directory(config, os.environ), config, output=sys.stderr)
    error = VtserveError(plan.failure.what)
    record = reporter.begin(error, doing=f"planning to load {config.model}", fatal=True)
    record.allocation = plan.failure.request
    record.levers = plan.levers
    record.ledger = plan.ledger
    record.trace = [plan.failure.line]
    reporter.write(record)
    return record


def _say(line: str) -> None:
    click.echo(line, err=True)
