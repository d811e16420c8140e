"""What the control plane reads from its surroundings: sizes as people write them, and where files are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

BYTE_SIZE_EXAMPLES = "1000000000, 200MiB or 1.5G"

_BYTE_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:_[0-9]{1,30})*(?:\.[0-9]{1,30})?)\s*(?P<unit>[a-z]*)", re.ASCII)
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_LARGEST = 2**63 - 1


def parse_byte_size(text: str) -> int:
    """Number of bytes that `text` writes: plain (``1000000000``) or with a unit, in any case.

    ``K``, ``M``, ``G``, ``T`` and ``KiB`` … ``TiB`` are powers of 1024; ``KB`` … ``TB`` are powers of 1000 (as GNU
    coreutils reads them). Fractions are rounded down to whole bytes.

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
        raise ValueError(f"{text!r} must be at least 1 byte and less than 8 EiB; write it like {BYTE_SIZE_EXAMPLES}")
    return size


def format_byte_size(size: int) -> str:
    """`size` in a unit that `parse_byte_size` reads, with one decimal: ``200.0MiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{size}B" if unit == "B" else f"{amount:.1f}{unit}"
        amount /= 1024
    return f"{amount:.1f}TiB"


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where downloads and what was made from them are kept: ``VTSERVE_CACHE``, else ``$XDG_CACHE_HOME/vtserve``."""
    if own := environ.get("VTSERVE_CACHE"):
        return Path(own).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "vtserve"
