"""Byte sizes as people write them, and where files are kept."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.settings import cache_directory, parse_byte_size, trace_settings
from engine.errors import ConfigurationError
from engine.memory.settings import TraceSettings

UNITS = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}


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
    message = ""
    size = None
    try:
        size = parse_byte_size(text)
    except ValueError as error:
        message = str(error)
    if size is None:
        assert "200MiB" in message
        assert "\n" not in message
    else:
        assert 1 <= size < 2**63
        assert text.strip()[0] in "0123456789"


def test_cache_directory_follows_the_environment() -> None:
    assert cache_directory({"VTSERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/vtserve")
    unset = {"VTSERVE_CACHE": "", "XDG_CACHE_HOME": ""}
    assert cache_directory(unset) == Path("~/.cache/vtserve").expanduser()


def test_without_a_home_the_variable_to_set_is_named(no_home: None) -> None:
    assert cache_directory({"VTSERVE_CACHE": "/a"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/vtserve")
    with pytest.raises(ConfigurationError, match=r"^there is no home directory; set VTSERVE_CACHE "):
        cache_directory({})
    with pytest.raises(ConfigurationError, match=r"^VTSERVE_CACHE=~nobody-here/a: no such home directory"):
        cache_directory({"VTSERVE_CACHE": "~nobody-here/a"})


NO_FLAGS = dict.fromkeys(("alloc_trace", "alloc_stats", "alloc_observe")) | {
    f"alloc_trace_{flag}": None for flag in ("min_mib", "low_free_mib", "file", "records")
}


def test_trace_flags_win_over_the_environment() -> None:
    prefix = "VT_CUDA_ALLOC_TRACE"
    environ = {prefix: "1", f"{prefix}_MIN_MIB": "8", f"{prefix}_RECORDS": "128"}
    assert trace_settings(environ, NO_FLAGS) == TraceSettings(trace=True, min_bytes=8 * 2**20, records=128)
    flags = {**NO_FLAGS, "alloc_stats": True, "alloc_trace_min_mib": 0.5, "alloc_trace_file": "ring"}
    expected = TraceSettings(trace=True, stats=True, min_bytes=2**19, records=128, file=Path("ring"))
    assert trace_settings(environ, flags) == expected
    assert trace_settings({prefix: "1"}, {**NO_FLAGS, "alloc_trace": False}) == TraceSettings()


@pytest.mark.parametrize(
    ("flag", "value"), [("file", "ring"), ("min_mib", 1.0), ("low_free_mib", 0.0), ("records", 64)]
)
def test_how_to_trace_is_refused_while_tracing_is_off(flag: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"--alloc-trace-{flag.replace('_', '-')}: tracing is off"):
        trace_settings({}, {**NO_FLAGS, f"alloc_trace_{flag}": value})


@pytest.mark.parametrize("flag", ["min_mib", "low_free_mib"])
@pytest.mark.parametrize("value", [1e308, 1e300, 2.0**40, -1.0, float("nan"), float("inf")])
def test_sizes_that_no_record_can_hold_are_refused(flag: str, value: float) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"--alloc-trace-{flag.replace('_', '-')} \S+: expected a number of MiB"
    ):
        trace_settings({}, {**NO_FLAGS, "alloc_trace": True, f"alloc_trace_{flag}": value})


def test_a_variable_that_is_not_understood_is_refused_even_beside_its_flag() -> None:
    with pytest.raises(ConfigurationError, match="VT_CUDA_ALLOC_TRACE='maybe'"):
        trace_settings({"VT_CUDA_ALLOC_TRACE": "maybe"}, {**NO_FLAGS, "alloc_trace": True})
