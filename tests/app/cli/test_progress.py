"""A bar on a terminal; elsewhere lines, and only for what takes long."""

from __future__ import annotations

import io

import pytest

from app.cli.progress import LINE_SECONDS, ProgressBar


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


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("output", "as_lines"), [(io.StringIO(), False), (Terminal(), True)])
def test_what_takes_long_says_so_in_lines_elsewhere(output: io.StringIO, as_lines: bool) -> None:
    clock = Clock()
    with ProgressBar(output, as_lines=as_lines, clock=clock) as progress:
        progress("load", 0, 10 << 20)
        clock.now += LINE_SECONDS / 2
        progress("load", 5 << 20, 10 << 20)
        assert output.getvalue() == ""
        clock.now += LINE_SECONDS / 2
        progress("load", 6 << 20, 10 << 20)
        progress("load", 7 << 20, 10 << 20)
        clock.now += LINE_SECONDS
        progress("quantize", 1 << 19, 2 << 20)
    assert output.getvalue() == "load: 60 %\nquantize: 25 %\n"


@pytest.mark.parametrize(("output", "as_lines"), [(io.StringIO(), False), (Terminal(), True)])
def test_what_is_done_at_once_says_nothing_elsewhere(output: io.StringIO, as_lines: bool) -> None:
    with ProgressBar(output, as_lines=as_lines, clock=Clock()) as progress:
        progress("load", 0, 10)
        progress("load", 10, 10)
    assert output.getvalue() == ""


def test_a_reader_that_left_ends_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Clock()
    with ProgressBar(Gone(), clock=clock) as progress:
        clock.now += LINE_SECONDS
        progress("load", 1, 2)
