"""How many threads, and how they wait."""

from __future__ import annotations

import numba
import pytest

from engine.backend.cpu.threads import limit_spinning, resolve_threads
from engine.errors import ConfigurationError

CORES = numba.config.NUMBA_NUM_THREADS


@pytest.mark.parametrize("threads", [0, -1, CORES + 1])
def test_threads_are_cores(threads: int) -> None:
    with pytest.raises(ConfigurationError, match=f"--threads {threads}: expected 1 to {CORES}"):
        resolve_threads(threads)


def test_threads() -> None:
    assert resolve_threads(None) == CORES
    assert resolve_threads(1) == 1


def test_idle_threads_sleep_soon_unless_told_how_to_wait() -> None:
    environ: dict[str, str] = {}
    limit_spinning(environ)
    assert environ == {"GOMP_SPINCOUNT": "5000"}
    for chosen in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        environ = dict(chosen)
        limit_spinning(environ)
        assert environ == chosen
