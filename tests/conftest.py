"""Fixtures that every part's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CHECKPOINTS


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """Small checkpoints written by ModelOpt and llm-compressor, with reference outputs.

    A test that asks for one that is not here is skipped, with a reason.
    """
    return CHECKPOINTS
