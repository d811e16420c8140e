"""A progress bar on stderr, while stderr is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """One bar after another: bytes, rate and what is left. Called with a label, the bytes done and all bytes.

    Nothing is shown, and rich is not imported, where `output` is no terminal or the bar is `quiet`. A full
    bar disappears: what stays on the screen is the result.
    """

    def __init__(self, output: TextIO, *, quiet: bool = False) -> None:
        self._output = output
        self._enabled = not quiet and output.isatty()
        self._progress: Progress | None = None
        self._label: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, label: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `label` are done; another label starts another bar."""
        if not self._enabled:
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
