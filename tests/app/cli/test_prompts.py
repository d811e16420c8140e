"""Prompts from flags, files and standard input."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import pytest

from app.cli.prompts import gather_prompts


def test_flags_come_before_the_file_and_blank_lines_are_none(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffGrüße \r\n\n   \nsecond\u2028still second\nthird".encode())
    assert gather_prompts(["zeroth", ""], str(file)) == [
        *("zeroth", "", "Grüße "),
        *("second\u2028still second", "third"),
    ]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"eins\nzwei\n"), encoding="ascii"))
    assert gather_prompts([], "-") == ["eins", "zwei"]


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "holds no prompt"), (b" \n\r\n", "holds no prompt"), (b"fine\n\xff\xfe\n", "line 2 is not UTF-8")],
)
def test_a_file_without_prompts_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    with pytest.raises(click.BadParameter, match=message) as caught:
        gather_prompts([], str(file))
    assert "prompts.txt" in caught.value.message


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="No such file"):
        gather_prompts([], str(tmp_path / "absent"))
    with pytest.raises(click.BadParameter, match="number 2 is not UTF-8"):
        gather_prompts(["fine", "not\udcff"], None)
    with pytest.raises(click.BadParameter, match="number 1 is not UTF-8"):
        gather_prompts(["lone\ud800"], None)


def test_arguments_are_utf8_where_the_locale_is_not() -> None:
    assert gather_prompts([b"Gr\xc3\xbc\xc3\x9fe".decode("ascii", "surrogateescape")], None) == ["Grüße"]
