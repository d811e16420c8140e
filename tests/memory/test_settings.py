from __future__ import annotations

from pathlib import Path

import pytest

from engine.memory import settings
from engine.memory.errors import ConfigurationError
from engine.memory.settings import TraceSettings

MIB = 1 << 20
VARIABLES = sorted(value for name, value in vars(settings).items() if name.endswith("_VARIABLE"))


def test_nothing_set_means_off_with_the_documented_defaults() -> None:
    assert TraceSettings.from_environ({}) == TraceSettings(
        trace=False, stats=False, min_bytes=16 * MIB, low_free_bytes=2048 * MIB, file=None, records=65_536
    )


@pytest.mark.parametrize("name", ["trace", "stats", "observe"])
@pytest.mark.parametrize(
    ("text", "on"),
    [("1", True), ("true", True), ("on", True), ("ON", True), ("True", True),
     ("", False), ("0", False), ("false", False), ("off", False), ("Off", False)],
)  # fmt: skip
def test_switches(name: str, text: str, on: bool) -> None:
    assert getattr(TraceSettings.from_environ({f"VT_CUDA_ALLOC_{name.upper()}": text}), name) is on


def test_every_variable_arrives() -> None:
    read = TraceSettings.from_environ(
        {
            "VT_CUDA_ALLOC_TRACE": "1",
            "VT_CUDA_ALLOC_STATS": "on",
            "VT_CUDA_ALLOC_TRACE_MIN_MIB": "0.5",
            "VT_CUDA_ALLOC_TRACE_LOW_FREE_MIB": "0",
            "VT_CUDA_ALLOC_TRACE_FILE": "/tmp/trace",
            "VT_CUDA_ALLOC_TRACE_RECORDS": "1024",
            "VT_CUDA_ALLOC_OBSERVE": "on",
        }
    )
    assert read == TraceSettings(True, True, MIB // 2, 0, Path("/tmp/trace"), 1024, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VT_CUDA_ALLOC_TRACE", "yes"),
        ("VT_CUDA_ALLOC_TRACE", "2"),
        ("VT_CUDA_ALLOC_STATS", "ture"),
        ("VT_CUDA_ALLOC_TRACE_MIN_MIB", "-1"),
        ("VT_CUDA_ALLOC_TRACE_MIN_MIB", "16MiB"),
        ("VT_CUDA_ALLOC_TRACE_LOW_FREE_MIB", "nan"),
        ("VT_CUDA_ALLOC_TRACE_LOW_FREE_MIB", "inf"),
        ("VT_CUDA_ALLOC_TRACE_RECORDS", "0"),
        ("VT_CUDA_ALLOC_TRACE_RECORDS", "1e5"),
        ("VT_CUDA_ALLOC_TRACE_RECORDS", "99999999999"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TraceSettings.from_environ({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r}: expected ")
    assert len(message.splitlines()) == 1


def test_the_manual_names_every_variable() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "ENVIRONMENT.md").read_text()
    assert len(VARIABLES) == 7
    for variable in VARIABLES:
        assert f"`{variable}`" in manual
