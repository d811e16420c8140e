"""The user's own directories, which not every user has: a container's user id need not have a home."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_directory", "under_home"]


def under_home(path: str) -> Path | None:
    """`path` with its ``~`` replaced. None where nothing says what the home is: no HOME, no such account."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return None


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """``VTSERVE_CACHE``, else ``$XDG_CACHE_HOME/vtserve``, else ``~/.cache/vtserve``; None without a home."""
    if own := environ.get("VTSERVE_CACHE"):
        return under_home(own)
    base = environ.get("XDG_CACHE_HOME")
    return Path(base) / "vtserve" if base else under_home("~/.cache/vtserve")
