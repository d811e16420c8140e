"""What ``vtserve bench serve`` does: prompts, a warm-up, the load with a bar, and the result."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import click

from app.benchmark.load import Load, LoadSettings
from app.benchmark.report import details, report, report_lines
from app.benchmark.workload import TEXT, Prompt, token_prompts, word_prompts
from app.cli.group import INTERRUPTED, Failure
from app.cli.prompts import gather_prompts
from app.open_ai import is_chat, tokenize
from engine.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Measured", "check_writable", "make_prompts", "measure", "result_path", "write_result"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A load that has ended, or was interrupted."""

    load: Load
    interrupted: bool

    def figures(self, *, detailed: bool) -> dict[str, Any]:
        """The report; with `detailed` every request, too."""
        load = self.load
        figures = {"date": f"{datetime.now(UTC):%Y%m%d-%H%M%S}"}
        figures |= report(load.settings, load.outcomes, load.seconds, unfinished=load.unfinished)
        return figures | details(load.outcomes) if detailed else figures

    def raise_failure(self) -> None:
        """End with the status that the command promises, if that is not 0."""
        if self.interrupted:
            click.get_current_context().exit(INTERRUPTED)
        failed = sum(outcome.error is not None for outcome in self.load.outcomes)
        if failed:
            raise Failure(f"{failed} of {len(self.load.outcomes)} requests failed", status=1)


def make_prompts(settings: LoadSettings, count: int, length: int, dataset: str | None) -> list[Prompt]:
    """`count` prompts: lines of the file `dataset` in turn, or `length` random tokens each.

    Random prompts are token ids where the server tells its tokens and takes them, and words otherwise.
    """
    if dataset is not None:
        texts = gather_prompts([], dataset, flag="--dataset-path")
        return [texts[number % len(texts)] for number in range(count)]
    vocabulary = None
    if not is_chat(settings.endpoint):
        vocabulary = tokenize(settings.base_url, settings.api_key, settings.model, TEXT, settings.timeout)
    if vocabulary:
        return token_prompts(count, length, settings.seed, sorted(set(vocabulary)))
    return word_prompts(count, length, settings.seed)


def measure(settings: LoadSettings, prompts: Sequence[Prompt], *, warmups: int) -> Measured:
    """Run the load. Ctrl-C ends it, and keeps what was measured.

    Raises
    ------
    Failure
        A warm-up failed: the load would, too.
    """
    allow_connections(settings.max_concurrency or len(prompts))
    load = Load(settings, prompts)

    async def main() -> None:
        for number in range(warmups):
            warmup = Load(settings, [prompts[-1 - number % len(prompts)]])
            await warmup.run(lambda done, total: None)
            if error := warmup.outcomes[0].error:
                raise Failure(f"{settings.base_url}: {error}", status=1)
        with RequestBar(shown=sys.stderr.isatty()) as bar:
            await load.run(bar)

    try:
        anyio.run(main)
    except KeyboardInterrupt:
        if not load.outcomes:
            raise
        return Measured(load, interrupted=True)
    return Measured(load, interrupted=False)


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files for `count` connections, as far as the system lets it."""
    wanted = count + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def result_path(settings: LoadSettings) -> Path:
    """Where ``--save-result`` writes."""
    rate = "inf" if math.isinf(settings.rate) else f"{settings.rate:g}"
    model = re.sub(r"[^\w.-]+", "_", settings.model.rpartition("/")[2])[:100]
    return Path(f"vtserve-{rate}qps-{model}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")


def check_writable(file: Path) -> None:
    """Find out before the load if its result can be written. Raises ConfigurationError."""
    if not file.parent.is_dir():
        raise ConfigurationError(f"--result-filename {file}: there is no directory {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigurationError(f"--result-filename {file}: cannot be written")


def write_result(measured: Measured, *, detailed: bool, as_json: bool, file: Path | None) -> None:
    """Write the figures to standard output, and as JSON to `file`; to the one where the other fails, too."""
    figures = measured.figures(detailed=detailed)
    document = json.dumps(figures, indent=1, ensure_ascii=False)
    failed = None
    if file is not None:
        try:
            file.write_text(document + "\n", encoding="utf-8")
        except OSError as error:  # a full disk names no file
            failed = OSError(error.errno, error.strerror, str(file))
    click.echo(document if as_json else "\n".join(report_lines(figures)))
    if failed is not None:
        raise failed


class RequestBar:
    """Requests that ended, on stderr. Nothing is shown, and rich is not imported, unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task("requests", total=None)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
