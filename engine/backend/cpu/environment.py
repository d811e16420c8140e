"""What the environment says of numba, checked before numba reads it: it does so once, when it is imported."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigurationError

__all__ = ["check_environment"]

_MOST_THREADS = 4096
"""as of ``--threads``"""


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse a number of threads that numba cannot have.

    Raises
    ------
    ConfigurationError
        ``NUMBA_NUM_THREADS`` is not a number from 1 to 4096.
    """
    threads = environ.get("NUMBA_NUM_THREADS")
    if threads is None:
        return
    digits = threads.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 6 and 1 <= int(digits) <= _MOST_THREADS):
        raise ConfigurationError(
            f"NUMBA_NUM_THREADS={threads[:40]!r} in the environment: "
            f"expected a whole number from 1 to {_MOST_THREADS}"
        )
