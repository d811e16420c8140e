"""How many threads kernels run on, and how those wait for work."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import numba

from engine.errors import ConfigurationError

__all__ = ["limit_spinning", "resolve_threads"]

_SPINS = "5000"
"""turns of the loop in which a thread of libgomp waits before it sleeps: some 60 µs"""


def resolve_threads(threads: int | None) -> int:
    """The number of threads that `threads` asks for; None: all cores that the process may use.

    Raises
    ------
    ConfigurationError
        There are not so many cores.
    """
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when it is imported
    if threads is not None and not 1 <= threads <= most:
        raise ConfigurationError(f"--threads {threads}: expected 1 to {most}, the cores this process may use")
    return threads or most


def limit_spinning(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have idle threads sleep soon, unless the environment says how they should wait.

    A thread that waits for its next kernel, or for the others to finish theirs, spins: some milliseconds if
    libgomp is left alone. If another process has one of the cores, the scheduler may put two of our threads
    on the other, and one that spins keeps the one that it waits for from running. Every kernel then takes
    those milliseconds: a token 800 ms. The pauses between kernels are shorter than what is left here.

    libgomp reads this once, when numba loads it for the first parallel kernel of the process.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", _SPINS)
