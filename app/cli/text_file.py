"""Reads a text file that a flag names."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigurationError


def read_text(flag: str, path: Path) -> str:
    """The file's text. Raises ConfigurationError, naming `flag`, where it is no UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{flag} {path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {error.strerror}") from None
