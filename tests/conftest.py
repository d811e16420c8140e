"""Fixtures that every part's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.checkpoints import CHECKPOINTS

# How long an example takes says something of the machine, not of the code. The rest is as it was: CI's too.
settings.register_profile("vtserve", parent=settings(), deadline=None)
settings.load_profile("vtserve")


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """Small checkpoints written by ModelOpt and llm-compressor, with reference outputs.

    A test that asks for one that is not here is skipped, with a reason.
    """
    return CHECKPOINTS
