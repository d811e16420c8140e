"""Fixtures that every part's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_checkpoints() -> Path:
    """Small checkpoints written by ModelOpt and llm-compressor, with reference outputs."""
    directory = Path(__file__).resolve().parents[2] / "shared" / "checkpoints"
    if not directory.is_dir():
        pytest.skip("no shared/checkpoints beside this checkout")
    return directory
