"""Byte sizes as people write them, and where files are kept."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.settings import cache_directory, format_byte_size, parse_byte_size

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40} | {
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1, "": 1
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000000", 1_000_000_000),
        ("1_000_000", 1_000_000),
        ("1GiB", 2**30),
        ("200MiB", 200 * 2**20),
        ("1.5G", 3 * 2**29),
        ("1.5gb", 1_500_000_000),
        (" 64 kib ", 65536),
        ("7B", 7),
    ],
)
def test_sizes_people_write(text: str, size: int) -> None:
    assert parse_byte_size(text) == size


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.integers(0, 999), st.booleans())
def test_number_times_unit(whole: int, unit: str, thousandths: int, upper: bool) -> None:
    text = f"{whole}.{thousandths:03}{unit.upper() if upper else unit}"
    assert parse_byte_size(text) == int((whole + Fraction(thousandths, 1000)) * UNITS[unit])


@given(st.text(max_size=40))
@example("")
@example("-1")
@example("0")
@example("0.4B")
@example("nan")
@example("inf")
@example("1e9")
@example("1..5G")
@example("9" * 30)
@example("1GiBs")
@example("٣")  # a digit to str.isdigit, not to us
@example("1\n")
def test_anything_else_is_one_line_with_an_example(text: str) -> None:
    try:
        size = parse_byte_size(text)
    except ValueError as error:
        assert "200MiB" in str(error)
        assert "\n" not in str(error)
    else:
        assert 1 <= size < 2**63
        assert text.strip()[0] in "0123456789"


@given(st.integers(1, 2**60))
def test_format_is_read_back_within_its_decimal(size: int) -> None:
    assert parse_byte_size(format_byte_size(size)) == pytest.approx(size, rel=0.06)


def test_cache_directory_follows_the_environment() -> None:
    assert cache_directory({"VTSERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/vtserve")
    assert cache_directory({"VTSERVE_CACHE": "", "XDG_CACHE_HOME": ""}) == Path("~/.cache/vtserve").expanduser()
