"""Text for a terminal: aligned columns, and no control characters that a file brings."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["aligned", "printable", "printable_lines"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` on one line, without what would steer a terminal; ``?`` stands for each such character."""
    return _CONTROL.sub("?", text)


def printable_lines(text: str) -> str:
    """`text` as it is but for what would steer a terminal; line ends and tabs stay."""
    return _STEERING.sub("?", text)


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table: the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
