"""``vtserve plan``: what a load would take, and whether it fits, before a byte of weight is read."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from app.cli.options import Flag, HelpfulCommand, WholeNumber, engine_flags, flag_group, model_flags

DOES_NOT_FIT = 3

EPILOG = """\b
Example:
  vtserve plan path/to/checkpoint --gpu rtx-4090 --device-memory 23.6GiB
"""

plan_flags = flag_group(
    "plan",
    [
        Flag(
            ["--gpu"],
            group="Plan",
            common=True,
            metavar="NAME",
            help="Plan for a GPU that is not here: rtx-4090, h100 …",
        ),
        Flag(
            ["--at-length"],
            group="Plan",
            common=True,
            type=WholeNumber(min=1),
            multiple=True,
            metavar="N",
            help="Count the sequences of N tokens that fit.",
        ),
        Flag(["--json", "as_json"], group="Plan", common=True, is_flag=True, help="Write JSON."),
        Flag(
            ["--max-logits-rows"],
            group="Plan",
            type=WholeNumber(min=1),
            metavar="N",
            default_text="--max-num-seqs",
            help="Rows of logits in a step, as serve takes it.",
        ),
    ],
)


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@click.argument("model_argument", metavar="[MODEL]", required=False)
@plan_flags
@model_flags
@engine_flags
def plan(
    model_argument: str | None, plan: dict[str, Any], model: dict[str, Any], engine: dict[str, Any]
) -> None:
    """Say what loading MODEL would take, by its headers alone. Exits with 3 if it does not fit."""
    if model_argument is not None and model["model"] not in (None, model_argument):
        raise click.UsageError(f"MODEL is {model_argument}, --model is {model['model']}: give one.")
    import logging

    import msgspec

    from app.cli.plan_text import plan_lines
    from app.cli.progress import ProgressBar
    from app.demo_model import ensure_demo_model
    from engine.config import EngineConfig
    from engine.planning.device import NoDeviceError
    from engine.planning.model import plan_load

    wanted = model_argument or model.pop("model")
    model.pop("model", None)
    if wanted is None:
        with ProgressBar(sys.stderr) as progress:
            wanted = str(ensure_demo_model(progress))
    config = EngineConfig.from_flags(model=wanted, max_logits_rows=plan["max_logits_rows"], **model, **engine)
    try:
        found = plan_load(
            config,
            gpu=plan["gpu"],
            gpu_memory=config.device_memory,
            log=logging.getLogger("vtserve"),
        )
    except NoDeviceError as error:
        raise NoDeviceError(f"{error}; --gpu NAME plans for one that is not here") from error
    cache = found.kv_cache
    if plan["as_json"]:
        facts = msgspec.to_builtins(found)
        facts["sequences_at"] = {
            str(length): cache.sequences_at(length) if cache is not None else 0
            for length in plan["at_length"]
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        for line in plan_lines(found, plan["at_length"]):
            click.echo(line)
    click.get_current_context().exit(0 if found.fits else DOES_NOT_FIT)
