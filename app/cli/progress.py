"""How far a long step is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
"""after which a step without a bar gets a line, and another one"""


class ProgressBar:
    """One bar after another: bytes, rate and what is left. Called with a label, the bytes done and all bytes.

    A full bar disappears: what stays on the screen is the result. Where `output` is no terminal, or other
    lines are written there meanwhile (`as_lines`), a label gets a line every `LINE_SECONDS`, and rich is not
    imported. A container's log so shows that the first start works on something.
    """

    def __init__(
        self, output: TextIO, *, as_lines: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = output
        self._as_bar = not as_lines and output.isatty()
        self._clock = clock
        self._progress: Progress | None = None
        self._label: str | None = None
        self._task: TaskID | None = None
        self._said_at = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, label: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `label` are done; another label starts another bar."""
        if not self._as_bar:
            self._say(label, done, total)
            return
        if label != self._label:
            self.close()
            self._start(label, total)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Take the bar away. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = self._label = None

    def _say(self, label: str, done: int, total: int) -> None:
        now = self._clock()
        if now - self._said_at < LINE_SECONDS:
            return
        self._said_at = now
        with suppress(OSError):  # whoever read it may have gone; what is waited for has not
            self._output.write(f"{label}: {100 * done // max(total, 1)} %\n")
            self._output.flush()

    def _start(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=Console(file=self._output),
            transient=True,
        )
        self._label = label
        self._task = self._progress.add_task(label, total=total)
        self._progress.start()
