"""``vtserve generate``: complete prompts offline, in one continuous batch."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from app.cli.group import Failure
from app.cli.options import (
    Flag,
    HelpfulCommand,
    engine_flags,
    failure_flags,
    flag_group,
    model_flags,
    sampling_flags,
    trace_flags,
)
from app.cli.planning import plan_flags, refuse_what_does_not_fit

DEMO_MODEL = "SmolLM2-135M-Instruct"
DEMO_PROMPT = "The capital of France is"

EPILOG = f"""\b
Example:
  vtserve generate --prompt "{DEMO_PROMPT}" --max-tokens 16
"""

PROMPT = "Prompt and output"

prompt_flags = flag_group(
    "prompts",
    [
        Flag(["--prompt"], group=PROMPT, common=True, multiple=True, help="Text to go on from; repeatable."),
        Flag(
            ["--prompt-file"],
            group=PROMPT,
            common=True,
            metavar="FILE",
            help="Prompts, one a line; - is standard input.",
        ),
        Flag(
            ["--chat"],
            group=PROMPT,
            common=True,
            is_flag=True,
            help="Ask each prompt through the chat template.",
        ),
        Flag(
            ["--stream"],
            group=PROMPT,
            common=True,
            is_flag=True,
            help="Write text as it comes, JSON as lines.",
        ),
        Flag(
            ["--output"],
            group=PROMPT,
            common=True,
            type=click.Choice(["text", "json"]),
            default="text",
            help="How results are written.",
        ),
    ],
)


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@model_flags
@prompt_flags
@sampling_flags
@engine_flags
@trace_flags
@failure_flags
@plan_flags
def generate(
    model: dict[str, Any],
    prompts: dict[str, Any],
    sampling: dict[str, Any],
    engine: dict[str, Any],
    trace: dict[str, Any],
    failure: dict[str, Any],
    planning: dict[str, Any],
) -> None:
    """Complete prompts offline, all in one continuous batch."""
    from app.cli.prompts import gather_prompts
    from app.settings import trace_settings

    texts = gather_prompts(prompts["prompt"], prompts["prompt_file"])
    if not texts:
        if model["model"] is not None:
            raise click.UsageError("Nothing to go on from: give --prompt TEXT or --prompt-file FILE.")
        texts = [DEMO_PROMPT]
    settings = trace_settings(os.environ, trace)

    import msgspec

    from app.cli.progress import ProgressBar
    from app.cli.statistics import statistics_table
    from app.cli.writers import make_writer
    from app.demo_model import ensure_demo_model
    from engine.config import EngineConfig
    from engine.llm import LLM
    from engine.planning.after_load import difference_lines
    from engine.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    wanted = model.pop("model")
    config = EngineConfig.from_flags(model=wanted or DEMO_MODEL, **model, **engine, **failure)
    # Lines of the trace and a bar that redraws itself would write over each other.
    with ProgressBar(sys.stderr, as_lines=settings.trace) as progress:
        if wanted is None:
            config = msgspec.structs.replace(config, model=str(ensure_demo_model(progress)))
        refuse_what_does_not_fit(config, planning)
        llm = LLM(config, trace=settings, output=sys.stderr, progress=progress)
    with llm:
        writer = make_writer(prompts["output"], prompts=texts, n=params.n, model=wanted or DEMO_MODEL)
        inputs = [llm.chat_prompt(text) for text in texts] if prompts["chat"] else texts
        outputs = llm.generate(inputs, params, on_delta=writer.update if prompts["stream"] else None)
        writer.finish(outputs)
        if llm.house.statistics is not None:
            counts = statistics_table(llm.house.statistics.statistics())
            for line in [*difference_lines(llm.engine.differences), *counts]:
                click.echo(line, err=True)
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise Failure(errors[0], status=1)
