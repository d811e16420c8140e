"""``vtserve bench serve``: open-loop load against any server that speaks OpenAI's protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from app.cli.group import CommandGroup, LazyCommand
from app.cli.options import Flag, HelpfulCommand, Number, WholeNumber, flag_group

VERBS = {"serve": LazyCommand("app.cli.bench:serve", "Load a server, and tell what its clients waited for.")}

EPILOG = """\b
Example:
  vtserve bench serve --num-prompts 100 --request-rate 8 --ignore-eos
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
            type=WholeNumber(1, 65_535),
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
            metavar="PATH",
            default="/v1/completions",
            help="Or /v1/chat/completions.",
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
            type=WholeNumber(min=1),
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
            help="Requests a second (Poisson); inf: all at once.",
        ),
        Flag(
            ["--max-concurrency"],
            group=LOAD,
            common=True,
            type=WholeNumber(min=1),
            metavar="N",
            default_text="no limit",
            help="Most requests at once.",
        ),
        Flag(
            ["--random-input-len"],
            group=LOAD,
            common=True,
            type=WholeNumber(min=1),
            metavar="N",
            default=128,
            help="Tokens of a random prompt.",
        ),
        Flag(
            ["--random-output-len"],
            group=LOAD,
            common=True,
            type=WholeNumber(min=1),
            metavar="N",
            default=128,
            help="Tokens to generate.",
        ),
        Flag(
            ["--dataset-path"],
            group=LOAD,
            metavar="FILE",
            common=True,
            help="Prompts, one a line, in turn; - is standard input.",
        ),
        Flag(
            ["--ignore-eos/--no-ignore-eos"],
            group=LOAD,
            common=True,
            default=False,
            default_text="off",
            help="Generate all tokens (vLLM, vtserve).",
        ),
        Flag(["--temperature"], group=LOAD, type=Number(min=0), metavar="T", default=0.0, help="Randomness."),
        Flag(
            ["--num-warmups"],
            group=LOAD,
            type=WholeNumber(min=0),
            metavar="N",
            default=1,
            help="Requests before it that do not count.",
        ),
        Flag(
            ["--seed"],
            group=LOAD,
            type=WholeNumber(min=0),
            metavar="N",
            default=0,
            help="Of arrivals and prompts.",
        ),
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
            type=click.Choice(["text", "json"]),
            default="text",
            help="How figures are written.",
        ),
        Flag(
            ["--result-filename"],
            group=RESULT,
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Write them as JSON to this file, too.",
        ),
        Flag(
            ["--save-result"],
            group=RESULT,
            is_flag=True,
            help="The same, to a file here that is named for rate, model and time.",
        ),
        Flag(["--save-detailed"], group=RESULT, is_flag=True, help="Have every request in the JSON."),
    ],
)


@click.group(
    cls=CommandGroup,
    lazy_commands=VERBS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def bench() -> None:
    """Measure a server."""


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@target_flags
@load_flags
@result_flags
def serve(target: dict[str, Any], load: dict[str, Any], result: dict[str, Any]) -> None:
    """Load a server with requests that begin when they are due, and tell what its clients waited for.

    Status 1 if a request failed; Ctrl-C tells of what was done till then.
    """
    from app.benchmark.load import LoadSettings
    from app.cli.bench_run import check_writable, make_prompts, measure, result_path, write_result
    from app.open_ai import client_key, first_model, server_url

    flag, url = "--base-url", target["base_url"]
    if url is None:
        host = target["host"]
        flag, url = "--host", f"http://{f'[{host}]' if ':' in host else host}:{target['port']}"
    url = server_url(flag, url)
    if not target["endpoint"].startswith("/"):
        raise click.BadParameter("expected a path like /v1/completions.", param_hint="'--endpoint'")
    key = client_key(target["api_key"], os.environ)
    filename = result["result_filename"]
    if filename is not None:
        check_writable(filename)
    settings = LoadSettings(
        base_url=url,
        model=target["model"] or first_model(url, key, load["timeout"]),
        endpoint=target["endpoint"],
        rate=load["request_rate"],
        max_concurrency=load["max_concurrency"],
        output_tokens=load["random_output_len"],
        ignore_eos=load["ignore_eos"],
        temperature=load["temperature"],
        seed=load["seed"],
        timeout=load["timeout"],
        api_key=key,
    )
    if filename is None and result["save_result"]:
        filename = result_path(settings)
        check_writable(filename)
    prompts = make_prompts(settings, load["num_prompts"], load["random_input_len"], load["dataset_path"])
    measured = measure(settings, prompts, warmups=load["num_warmups"])
    write_result(
        measured, detailed=result["save_detailed"], as_json=result["output"] == "json", file=filename
    )
    measured.raise_failure()
