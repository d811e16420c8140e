"""What the control plane reads from its surroundings: sizes as people write them, variables, directories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from engine import directories
from engine.errors import ConfigurationError
from engine.memory.settings import END_OF_MIB, TraceSettings

BYTE_SIZE_EXAMPLES = "1000000000, 200MiB or 1.5G"

_BYTE_SIZE = re.compile(r"(?P<number>[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*(?P<unit>[a-z]*)", re.ASCII)
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_LARGEST = 2**63 - 1


def parse_byte_size(text: str) -> int:
    """Number of bytes that `text` writes: plain (``1000000000``) or with a unit, in any case.

    ``K``, ``M``, ``G``, ``T`` and ``KiB`` … ``TiB`` are powers of 1024; ``KB`` … ``TB`` are powers of 1000,
    as GNU coreutils reads them. Fractions are rounded down to whole bytes.

    Raises
    ------
    ValueError
        One line that says what is wrong and shows an example.
    """
    match = _BYTE_SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(match["unit"]) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size in bytes; write it like {BYTE_SIZE_EXAMPLES}")
    size = int(Decimal(match["number"]) * unit)
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"{text!r} is not from 1 byte to 8 EiB; write it like {BYTE_SIZE_EXAMPLES}")
    return size


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where downloads and models made of them are: ``VTSERVE_CACHE``, else ``$XDG_CACHE_HOME/vtserve``.

    Raises
    ------
    ConfigurationError
        Neither is set, and there is no home directory; one line that names the variable.
    """
    found = directories.cache_directory(environ)
    if found is None:
        given = environ.get("VTSERVE_CACHE")
        place = f"VTSERVE_CACHE={given}: no such home directory" if given else "there is no home directory"
        raise ConfigurationError(f"{place}; set VTSERVE_CACHE to a folder for downloaded models")
    return found


def trace_settings(environ: Mapping[str, str], flags: Mapping[str, Any]) -> TraceSettings:
    """What the memory house is to watch: the variables of `environ`, then the ``--alloc-…`` flags given.

    `flags` holds the values of `app.cli.options.trace_flags`; None is a flag that was not given.

    Raises
    ------
    ConfigurationError
        A variable or flag has a value that is not understood, or a flag says how to trace while tracing is
        off.
    """
    settings = TraceSettings.from_environ(environ)
    given = {
        "trace": flags["alloc_trace"],
        "stats": flags["alloc_stats"],
        "min_bytes": _mebibytes(flags, "alloc_trace_min_mib"),
        "low_free_bytes": _mebibytes(flags, "alloc_trace_low_free_mib"),
        "file": Path(flags["alloc_trace_file"]) if flags["alloc_trace_file"] else None,
        "records": flags["alloc_trace_records"],
        "observe": flags["alloc_observe"],
    }
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if not settings.trace:
        for name, value in flags.items():
            if name.startswith("alloc_trace_") and value is not None:
                raise ConfigurationError(f"{_flag(name)}: tracing is off; turn it on with --alloc-trace")
    return settings


def _mebibytes(flags: Mapping[str, Any], name: str) -> int | None:
    value: float | None = flags[name]
    if value is None:
        return None
    if not 0 <= value < END_OF_MIB:
        raise ConfigurationError(f"{_flag(name)} {value:g}: expected a number of MiB from 0 to under 2**40")
    return int(value * 2**20)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
