"""The memory variables of the environment, read once at start-up. docs/ENVIRONMENT.md is their manual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.memory.errors import ConfigurationError

__all__ = [
    "END_OF_MIB",
    "FILE_VARIABLE",
    "LOW_FREE_VARIABLE",
    "MIN_VARIABLE",
    "OBSERVE_VARIABLE",
    "RECORDS_VARIABLE",
    "STATS_VARIABLE",
    "TRACE_VARIABLE",
    "TraceSettings",
]

TRACE_VARIABLE = "VT_CUDA_ALLOC_TRACE"
STATS_VARIABLE = "VT_CUDA_ALLOC_STATS"
OBSERVE_VARIABLE = "VT_CUDA_ALLOC_OBSERVE"
MIN_VARIABLE = "VT_CUDA_ALLOC_TRACE_MIN_MIB"
LOW_FREE_VARIABLE = "VT_CUDA_ALLOC_TRACE_LOW_FREE_MIB"
FILE_VARIABLE = "VT_CUDA_ALLOC_TRACE_FILE"
RECORDS_VARIABLE = "VT_CUDA_ALLOC_TRACE_RECORDS"

END_OF_MIB = 1 << 40
"""sizes in MiB are less than this: more bytes than any record can hold"""
_MIB = 1 << 20
_ON = frozenset({"1", "true", "on"})
_OFF = frozenset({"", "0", "false", "off"})
_FEWEST_RECORDS = 64
_MOST_RECORDS = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What the memory house is to watch. The command line's twins replace fields of the environment's."""

    trace: bool = False
    """record every request, print the large ones"""
    stats: bool = False
    """count requests, bytes and peaks by tag"""
    min_bytes: int = 16 * _MIB
    """print requests and frees of at least this size; also what the driver's free figure is read for"""
    low_free_bytes: int = 2048 * _MIB
    """print everything while less than this is free"""
    file: Path | None = None
    """the flight recorder's file; None keeps the record in the process's own memory"""
    records: int = 65_536
    """how many records the flight recorder's ring holds"""
    observe: bool = False
    """have CUPTI find device memory that goes past the allocator; CUDA only"""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> TraceSettings:
        """Settings out of `environ` (``os.environ``).

        Raises
        ------
        ConfigurationError
            A variable has a value that is not understood: one line that names it.
        """
        standard = cls()
        file = environ.get(FILE_VARIABLE, "")
        return cls(
            trace=_switch(environ, TRACE_VARIABLE),
            stats=_switch(environ, STATS_VARIABLE),
            min_bytes=_mebibytes(environ, MIN_VARIABLE, standard.min_bytes),
            low_free_bytes=_mebibytes(environ, LOW_FREE_VARIABLE, standard.low_free_bytes),
            file=Path(file) if file else None,
            records=_record_count(environ, standard.records),
            observe=_switch(environ, OBSERVE_VARIABLE),
        )


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _ON:
        return True
    if text in _OFF:
        return False
    raise ConfigurationError(
        f"{name}={environ[name]!r}: expected 1, true or on; or 0, false, off or nothing for off"
    )


def _mebibytes(environ: Mapping[str, str], name: str, standard: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return standard
    problem = ConfigurationError(f"{name}={environ[name]!r}: expected a number of MiB from 0 to under 2**40")
    try:
        value = float(text)
    except ValueError:
        raise problem from None
    if not 0 <= value < END_OF_MIB:  # not a number fails both
        raise problem
    return int(value * _MIB)


def _record_count(environ: Mapping[str, str], standard: int) -> int:
    text = environ.get(RECORDS_VARIABLE, "").strip()
    if not text:
        return standard
    problem = ConfigurationError(
        f"{RECORDS_VARIABLE}={environ[RECORDS_VARIABLE]!r}: expected a whole number "
        f"from {_FEWEST_RECORDS} to {_MOST_RECORDS}"
    )
    try:
        value = int(text)
    except ValueError:
        raise problem from None
    if not _FEWEST_RECORDS <= value <= _MOST_RECORDS:
        raise problem
    return value
