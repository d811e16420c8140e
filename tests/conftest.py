"""Fixtures that every part's tests share."""

from __future__ import annotations

import pwd
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from tests.checkpoints import CHECKPOINTS

# How long an example takes says something of the machine, not of the code. The rest is as it was: CI's too.
settings.register_profile("vtserve", parent=settings(), deadline=None)
settings.load_profile("vtserve")

# A shell without job control starts what it puts into the background (`make test &`) with SIGINT ignored. The
# processes that tests start and interrupt would inherit that, and never end.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No home directory, as for a container's user id without an account."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "VTSERVE_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """Small checkpoints written by ModelOpt and llm-compressor, with reference outputs.

    A test that asks for one that is not here is skipped, with a reason.
    """
    return CHECKPOINTS
