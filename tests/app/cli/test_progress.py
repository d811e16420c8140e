"""The bar is there on a terminal and nowhere else."""

from __future__ import annotations

import io

import pytest

from app.cli.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_sees_each_label_and_ends_clean() -> None:
    output = Terminal()
    with ProgressBar(output) as progress:
        progress("downloading", 0, 3 << 20)
        progress("downloading", 3 << 20, 3 << 20)
        progress("loading", 1 << 20, 2 << 20)
    shown = output.getvalue()
    assert "downloading" in shown
    assert "3.0/3.0 MiB" in shown
    assert "loading" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize(("output", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_nothing_is_shown_elsewhere(output: io.StringIO, quiet: bool) -> None:
    with ProgressBar(output, quiet=quiet) as progress:
        progress("loading", 0, 10)
        progress("loading", 10, 10)
    assert output.getvalue() == ""
