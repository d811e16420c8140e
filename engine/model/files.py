"""JSON files that we did not write, and how errors name what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from engine.errors import CheckpointError

__all__ = ["LARGEST_JSON", "read_json", "read_optional_json", "shown", "text_shown"]

LARGEST_JSON = 128 << 20
"""bytes: a multilingual tokenizer.json takes 35 MB, the largest shard index a few"""

_LONGEST = 120
_PIECE = 1 << 20


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError, which names it, for anything else."""
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe may never be written to
            raise CheckpointError(f"{file}: expected a file, found something else")
        with file.open("rb") as opened:
            data = b"".join(_pieces(opened))  # not at once: that takes a buffer of the largest size
        if len(data) > LARGEST_JSON:
            raise CheckpointError(f"{file}: larger than {LARGEST_JSON >> 20} MiB; expected a small JSON file")
        value = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {text_shown(str(error))}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {shown(value)}")
    return value


def _pieces(opened: IO[bytes]) -> Iterator[bytes]:
    """What `opened` holds, up to more than `LARGEST_JSON` bytes."""
    size = 0
    while size <= LARGEST_JSON and (piece := opened.read(_PIECE)):
        size += len(piece)
        yield piece


def read_optional_json(file: Path) -> dict[str, Any]:
    """Like `read_json`, ``{}`` where there is no such file."""
    return read_json(file) if file.exists() else {}


def shown(value: object) -> str:
    """`value` as it is written in Python, short enough for an error of one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists nested thousandfold
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def text_shown(text: str) -> str:
    """A name or message out of a file, on one line and without control characters."""
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= 2 * _LONGEST else f"{line[: 2 * _LONGEST]}…"
