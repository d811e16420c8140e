"""Flags that commands share: their types, their groups in the help, and how a group reaches a command.

A command takes one argument a group: a dictionary from names to values, in the spelling of the class that the
group fills (`EngineConfig`, `SamplingParams`)::

    @click.command(cls=HelpfulCommand)
    @engine_flags
    @trace_flags
    def plan(engine: dict[str, Any], trace: dict[str, Any]) -> None: ...

``--help`` shows the flags that a first hour needs and fits a screen; ``--help-all`` shows all, by group.
"""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import click

from app.settings import parse_byte_size

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class ByteSize(click.ParamType[int]):
    """A number of bytes as people write it; see `parse_byte_size`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_byte_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class WholeNumber(click.IntRange):
    """An integer in a range, and an answer to any other value that says in words what is expected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{reprlib.repr(value)}: expected a whole number{_describe_bounds(self)}.", param, ctx)


class Number(click.FloatRange):
    """A float in a range, likewise. Refuses NaN, which passes every comparison of `click.FloatRange`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{reprlib.repr(value)}: expected a number{_describe_bounds(self)}.", param, ctx)
        return number


def _describe_bounds(kind: click.IntRange | click.FloatRange) -> str:
    """``" of at least 1"``, ``" from 0 to 65535"``, ``" over 0 and at most 1"``."""
    low, high = kind.min, kind.max
    if low is None:
        return "" if high is None else f" of at most {high}"
    if kind.min_open:
        return f" over {low}" if high is None else f" over {low} and at most {high}"
    return f" of at least {low}" if high is None else f" from {low} to {high}"


class Text(click.ParamType[str]):
    """Some text, in UTF-8 also where the locale could not decode it (surrogate escapes, PEP 383)."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            text: str = value.encode(errors="surrogateescape").decode()
        except UnicodeError:
            self.fail(f"{value!r} is not UTF-8.", param, ctx)
        if not text:
            self.fail("'': expected text that is not empty.", param, ctx)
        return text


class Flag(click.Option):
    """An option that knows its group in the help, and if the short help shows it.

    Its line is shorter than click's: the first spelling only (an alias works all the same), ``--[no-]`` for a
    switch, the default in brackets, no range (a value outside of it is answered with the range).

    Parameters
    ----------
    default_text
        Shown as the default where that is not the value itself: ``"the model's"``.
    """

    def __init__(
        self, *args: Any, group: str, common: bool = False, default_text: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.common = common
        self.default_text = default_text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        name = self.opts[0]
        if self.secondary_opts:
            name = name.replace("--", "--[no-]", 1)
        elif not self.is_flag:
            name += f" {self.make_metavar(ctx).strip('[]')}"
        default = self.default_text
        if default is None and isinstance(self.default, int | float | str) and not self.is_bool_flag:
            default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return name, f"{self.help}  [{default}]" if default else str(self.help)


class HelpfulCommand(click.Command):
    """A command whose help shows `Flag` options by group: the common ones, or all with ``--help-all``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show every flag and exit.",
            )
        )

    def _show_all(self, ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta["vtserve.help_all"] = True
            click.echo(self.get_help(ctx))
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        every = ctx.meta.get("vtserve.help_all", False)
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            group = param.group if isinstance(param, Flag) and every else "Options"
            record = param.get_help_record(ctx)
            if record and (every or not isinstance(param, Flag) or param.common):
                groups.setdefault(group, []).append(record)
        for group, records in sorted(groups.items(), key=lambda item: item[0] == "Options"):
            with formatter.section(group):
                formatter.write_dl(records)


def flag_group(argument: str, flags: Sequence[Flag]) -> Decorator:
    """Decorator that adds `flags` and hands their values to the command as one dictionary, `argument`."""
    names = [flag.name for flag in flags]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def gathered(**values: Any) -> Any:
            group = {name: values.pop(name) for name in names}
            return function(**{argument: group}, **values)

        # click reads this list backwards, as decorators are applied from the inside out.
        gathered.__click_params__ = [*getattr(function, "__click_params__", []), *reversed(flags)]  # type: ignore[attr-defined]
        return gathered

    return decorate


ENGINE = "Engine"
MEMORY = "Memory"
SAMPLING = "Sampling"
FAILURE = "Failure records"
TRACE = "Memory trace"

model_flags = flag_group(
    "model",
    [
        Flag(
            ["--model"],
            group="Model",
            common=True,
            metavar="DIR|ID",
            default_text="a demo model",
            help="Checkpoint directory or Hub id.",
        ),
        Flag(
            ["--device"],
            group="Model",
            common=True,
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            help="auto: a CUDA device if there is one.",
        ),
        Flag(
            ["--threads"],
            group="Model",
            type=WholeNumber(min=1),
            metavar="N",
            default_text="all cores",
            help="CPU threads.",
        ),
    ],
)

engine_flags = flag_group(
    "engine",
    [
        Flag(
            ["--kv-cache-dtype"],
            group=MEMORY,
            common=True,
            type=click.Choice(["auto", "fp8", "fp8_e4m3", "bfloat16"]),
            default="auto",
            metavar="TYPE",
            help="auto (the checkpoint's), fp8, bfloat16.",
        ),
        Flag(
            ["--kv-cache-memory", "--kv-cache-memory-bytes", "kv_cache_memory"],
            group=MEMORY,
            common=True,
            type=ByteSize(),
            default_text="what is left",
            help="KV cache: 1000000000, 1GiB.",
        ),
        Flag(
            ["--gpu-memory-utilization"],
            group=MEMORY,
            type=Number(min=0, max=1, min_open=True),
            metavar="F",
            default=0.9,
            help="Share of the device to fill, if --kv-cache-memory is not given.",
        ),
        Flag(
            ["--device-memory"],
            group=MEMORY,
            common=True,
            type=ByteSize(),
            default_text="the host's",
            help="Capacity of the CPU device.",
        ),
        Flag(
            ["--cuda-allocator"],
            group=MEMORY,
            type=click.Choice(["malloc", "pool"]),
            default="malloc",
            help="A GPU's memory: cudaMalloc, or a pool of its own.",
        ),
        Flag(
            ["--max-num-seqs"],
            group=ENGINE,
            type=WholeNumber(min=1),
            metavar="N",
            default_text="32 on the CPU",
            help="Sequences that run at once.",
        ),
        Flag(
            ["--max-model-len"],
            group=ENGINE,
            type=WholeNumber(min=1),
            metavar="N",
            default_text="the model's",
            help="Longest prompt and output together.",
        ),
        Flag(
            ["--max-num-batched-tokens"],
            group=ENGINE,
            type=WholeNumber(min=1),
            metavar="N",
            default_text="512 on the CPU",
            help="Tokens of one step, prefill and decode together.",
        ),
        Flag(
            ["--block-size"],
            group=ENGINE,
            type=WholeNumber(min=1),
            metavar="N",
            default_text="16",
            help="Tokens of one KV cache block.",
        ),
        Flag(
            ["--enforce-eager/--no-enforce-eager"],
            group=ENGINE,
            default=True,
            default_text="on",
            help="Kernel by kernel, or decode as CUDA graphs (new).",
        ),
        Flag(
            ["--enable-prefix-caching/--no-enable-prefix-caching"],
            group=ENGINE,
            default=True,
            default_text="on",
            help="Reuse the KV blocks of equal prompt beginnings.",
        ),
    ],
)

sampling_flags = flag_group(
    "sampling",
    [
        Flag(
            ["--max-tokens"],
            group=SAMPLING,
            common=True,
            type=WholeNumber(min=1),
            metavar="N",
            default=64,
            help="Most tokens to generate.",
        ),
        Flag(
            ["--temperature"],
            group=SAMPLING,
            common=True,
            type=Number(min=0),
            metavar="T",
            default=0.0,
            default_text="0, greedy",
            help="Randomness of the choice.",
        ),
        Flag(
            ["--top-p"],
            group=SAMPLING,
            type=Number(min=0, max=1, min_open=True),
            metavar="P",
            default=1.0,
            help="Keep the likeliest tokens that together reach P.",
        ),
        Flag(
            ["--top-k"],
            group=SAMPLING,
            type=WholeNumber(min=-1),
            metavar="K",
            default=0,
            default_text="0, all",
            help="Keep the K likeliest tokens.",
        ),
        Flag(
            ["--min-p"],
            group=SAMPLING,
            type=Number(min=0, max=1),
            metavar="P",
            default=0.0,
            help="Drop tokens less likely than P times the likeliest.",
        ),
        Flag(
            ["--seed"],
            group=SAMPLING,
            type=WholeNumber(min=0, max=2**63 - 1),
            metavar="N",
            help="The same seed gives the same tokens.",
        ),
        Flag(
            ["--stop"],
            group=SAMPLING,
            type=Text(),
            multiple=True,
            metavar="TEXT",
            help="End the output before TEXT; repeatable.",
        ),
        Flag(
            ["--n", "-n", "n"],
            group=SAMPLING,
            type=WholeNumber(min=1, max=16_384),
            metavar="N",
            default=1,
            help="Outputs for each prompt.",
        ),
        Flag(
            ["--logprobs"],
            group=SAMPLING,
            type=WholeNumber(min=0, max=20),
            metavar="K",
            help="Add log probabilities, the K likeliest too, to --output json.",
        ),
        Flag(
            ["--repetition-penalty"],
            group=SAMPLING,
            type=Number(min=0, min_open=True),
            metavar="F",
            default=1.0,
            help="Over 1: avoid tokens of prompt and output.",
        ),
        Flag(
            ["--presence-penalty"],
            group=SAMPLING,
            type=Number(min=-2, max=2),
            metavar="F",
            default=0.0,
            help="Avoid tokens of the output.",
        ),
        Flag(
            ["--frequency-penalty"],
            group=SAMPLING,
            type=Number(min=-2, max=2),
            metavar="F",
            default=0.0,
            help="Avoid tokens by their count in the output.",
        ),
    ],
)

trace_flags = flag_group(
    "trace",
    [
        Flag(
            ["--alloc-trace/--no-alloc-trace"],
            group=TRACE,
            common=True,
            default=None,
            help="Print large allocations and failures.",
        ),
        Flag(
            ["--alloc-stats/--no-alloc-stats"],
            group=TRACE,
            default=None,
            help="Count allocations and bytes by tag; a table at the end.",
        ),
        Flag(
            ["--alloc-observe/--no-alloc-observe"],
            group=TRACE,
            default=None,
            help="On CUDA: find memory that goes past the allocator.",
        ),
        Flag(
            ["--alloc-trace-min-mib"],
            group=TRACE,
            type=Number(min=0),
            metavar="MIB",
            default_text="16",
            help="Print requests of this size and more.",
        ),
        Flag(
            ["--alloc-trace-low-free-mib"],
            group=TRACE,
            type=Number(min=0),
            metavar="MIB",
            default_text="2048",
            help="Print everything while less than this is free.",
        ),
        Flag(
            ["--alloc-trace-file"],
            group=TRACE,
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Record every request in this file; it survives a kill.",
        ),
        Flag(
            ["--alloc-trace-records"],
            group=TRACE,
            type=WholeNumber(min=64, max=2**24),
            metavar="N",
            default_text="65536",
            help="Records the file holds before the oldest is overwritten.",
        ),
    ],
)

failure_flags = flag_group(
    "failure",
    [
        Flag(
            ["--failure-dir"],
            group=FAILURE,
            type=click.Path(file_okay=False),
            metavar="DIR",
            default_text="$XDG_STATE_HOME/vtserve/failures",
            help="Where failure records go.",
        ),
        Flag(
            ["--record-prompts"],
            group=FAILURE,
            is_flag=True,
            help="Put the prompts into failure records.",
        ),
    ],
)

__all__ = [
    "ByteSize",
    "Flag",
    "HelpfulCommand",
    "Number",
    "Text",
    "WholeNumber",
    "engine_flags",
    "failure_flags",
    "flag_group",
    "model_flags",
    "sampling_flags",
    "trace_flags",
]
