"""``vtserve perplexity``: how well a model predicts a text."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from app.cli.options import Flag, HelpfulCommand, WholeNumber, model_flags, trace_flags

EPILOG = """\b
Example:
  vtserve perplexity --model DIR --file text.txt --window 512
"""


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@model_flags
@click.option(
    "--file",
    "file",
    cls=Flag,
    group="Text",
    common=True,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="UTF-8 text to predict.",
)
@click.option(
    "--window",
    cls=Flag,
    group="Text",
    common=True,
    type=WholeNumber(min=2),
    metavar="N",
    default_text="the whole text, or all the model's positions",
    help="Cut the text into windows of N tokens.",
)
@click.option(
    "--kv-cache-dtype",
    cls=Flag,
    group="Text",
    common=True,
    type=click.Choice(["auto", "fp8", "fp8_e4m3", "bfloat16", "float32"]),
    default="auto",
    metavar="TYPE",
    help="auto (the checkpoint's), fp8, bfloat16, float32.",
)
@click.option("--json", "as_json", cls=Flag, group="Text", common=True, is_flag=True, help="Write JSON.")
@trace_flags
def perplexity(
    model: dict[str, Any],
    file: Path,
    window: int | None,
    kv_cache_dtype: str,
    as_json: bool,
    trace: dict[str, Any],
) -> None:
    """Measure how well a model predicts a text."""
    from app.cli.text_file import read_text
    from app.settings import trace_settings

    text = read_text("--file", file)
    settings = trace_settings(os.environ, trace)

    import msgspec

    from app.cli.progress import ProgressBar
    from app.demo_model import ensure_demo_model
    from engine.llm import LLM
    from engine.perplexity import measure_perplexity, perplexity_config

    wanted = model.pop("model")
    with ProgressBar(sys.stderr, as_lines=settings.trace) as progress:
        directory = wanted or str(ensure_demo_model(progress))
        config = perplexity_config(directory, text, window=window, kv_cache_dtype=kv_cache_dtype, **model)
        llm = LLM(config, trace=settings, output=sys.stderr, progress=progress)
    with llm:
        result = measure_perplexity(llm, text, window)
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    click.echo(
        f"perplexity {result.perplexity:.2f} over {result.predicted_tokens:,} predicted tokens "
        f"in windows of {result.window:,}; {result.tokens_per_second:,.0f} tokens/s"
    )
