"""``vtserve bench serve``: open-loop load against any server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from app.cli.group import Failure
from app.cli.options import Flag, HelpfulCommand, Number, flag_group

EPILOG = """\b
Example:
  vtserve bench serve --num-prompts 100 --request-rate 8
"""

TARGET = "Server"
LOAD = "Load"
RESULT = "Result"


class Rate(Number):
    """A positive number, or ``inf``."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return float("inf") if value in ("inf", float("inf")) else super().convert(value, param, ctx)


target_flags = flag_group(
    "target",
    [
        Flag(
            ["--base-url"], group=TARGET, common=True, metavar="URL", help="Server to ask; or --host, --port."
        ),
        Flag(["--host"], group=TARGET, metavar="NAME", default="127.0.0.1", help="Where the server is."),
        Flag(
            ["--port"],
            group=TARGET,
            type=click.IntRange(1, 65_535),
            metavar="N",
            default=8000,
            help="Its port.",
        ),
        Flag(["--model"], group=TARGET, common=True, metavar="NAME", default_text="the first", help="Model."),
        Flag(["--api-key"], group=TARGET, metavar="KEY", help="Also VTSERVE_API_KEY."),
        Flag(
            ["--endpoint"],
            group=TARGET,
            common=True,
            type=click.Choice(["completions", "chat"]),
            default="completions",
            help="What is asked.",
        ),
    ],
)

load_flags = flag_group(
    "load",
    [
        Flag(
            ["--num-prompts"],
            group=LOAD,
            common=True,
            type=click.IntRange(min=1),
            metavar="N",
            default=100,
            help="Requests.",
        ),
        Flag(
            ["--request-rate"],
            group=LOAD,
            common=True,
            type=Rate(min=0, min_open=True),
            metavar="R",
            default=float("inf"),
            help="Requests a second, as a Poisson process; inf: all at once.",
        ),
        Flag(
            ["--max-concurrency"],
            group=LOAD,
            common=True,
            type=click.IntRange(min=1),
            metavar="N",
            default_text="no limit",
            help="Most requests at once.",
        ),
        Flag(
            ["--random-input-len"],
            group=LOAD,
            common=True,
            type=click.IntRange(min=1),
            metavar="N",
            default=128,
            help="Tokens of a random prompt.",
        ),
        Flag(
            ["--random-output-len"],
            group=LOAD,
            common=True,
            type=click.IntRange(min=1),
            metavar="N",
            default=128,
            help="Tokens to generate.",
        ),
        Flag(
            ["--dataset-path"],
            group=LOAD,
            metavar="FILE",
            help="Prompts, one a line, used in turn; - is standard input.",
        ),
        Flag(
            ["--ignore-eos/--no-ignore-eos"],
            group=LOAD,
            default=True,
            default_text="on",
            help="Generate all tokens (a field of vLLM's; others may refuse it).",
        ),
        Flag(["--temperature"], group=LOAD, type=Number(min=0), metavar="T", default=0.0, help="Randomness."),
        Flag(
            ["--num-warmups"],
            group=LOAD,
            type=click.IntRange(min=0),
            metavar="N",
            default=1,
            help="Requests before, that do not count.",
        ),
        Flag(["--seed"], group=LOAD, type=click.IntRange(min=0), metavar="N", default=0, help="Of it all."),
        Flag(
            ["--timeout"],
            group=LOAD,
            type=Number(min=0, min_open=True),
            metavar="S",
            default=600.0,
            help="Seconds without a byte after which a request has failed.",
        ),
    ],
)

result_flags = flag_group(
    "result",
    [
        Flag(
            ["--output"],
            group=RESULT,
            common=True,
            type=click.Choice(["text", "json"]),
            default="text",
            help="How figures are written.",
        ),
        Flag(
            ["--result-filename"],
            group=RESULT,
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Write them as JSON to this file as well.",
        ),
    ],
)


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a server."""


@bench.command(cls=HelpfulCommand, epilog=EPILOG)
@target_flags
@load_flags
@result_flags
def serve(target: dict[str, Any], load: dict[str, Any], result: dict[str, Any]) -> None:
    """Load a server with requests that begin when they are due, and tell what its clients waited for.

    Status 1 if a request failed.
    """
    import anyio

    from app.benchmark.load import LoadSettings, Prompt, random_prompts, run_load
    from app.benchmark.report import report, report_lines
    from app.cli.prompts import gather_prompts
    from app.open_ai import first_model, split_keys

    base_url = (
        (target["base_url"] or f"http://{target['host']}:{target['port']}").rstrip("/").removesuffix("/v1")
    )
    api_key = target["api_key"] or split_keys(os.environ)
    settings = LoadSettings(
        base_url=base_url,
        model=target["model"] or first_model(base_url, api_key),
        chat=target["endpoint"] == "chat",
        rate=load["request_rate"],
        max_concurrency=load["max_concurrency"],
        output_tokens=load["random_output_len"],
        ignore_eos=load["ignore_eos"],
        temperature=load["temperature"],
        seed=load["seed"],
        timeout=load["timeout"],
        api_key=api_key,
    )
    count = load["num_prompts"]
    prompts: list[Prompt]
    if load["dataset_path"] is not None:
        texts = gather_prompts([], load["dataset_path"])
        prompts = [texts[number % len(texts)] for number in range(count)]
    else:
        prompts = random_prompts(count, load["random_input_len"], load["seed"], as_text=settings.chat)

    async def main() -> dict[str, Any]:
        warm = prompts[: load["num_warmups"]]
        if warm:
            outcomes, _ = await run_load(settings, warm, lambda done, total: None)
            if all(outcome.error is not None for outcome in outcomes):
                raise Failure(f"{base_url}: {outcomes[0].error}", status=1)
        with _Bar(sys.stderr.isatty()) as bar:
            return report(settings, *await run_load(settings, prompts, bar))

    figures = anyio.run(main)
    text = json.dumps(figures, indent=1)
    if result["result_filename"] is not None:
        result["result_filename"].write_text(text + "\n")
    click.echo(text if result["output"] == "json" else "\n".join(report_lines(figures)))
    if figures["failed"]:
        raise Failure(f"{figures['failed']} of {count} requests failed", status=1)


class _Bar:
    """Requests done, on a terminal."""

    def __init__(self, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._progress.add_task("requests", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
