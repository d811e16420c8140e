"""A large model to plan for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_27b import write_sparse_checkpoint


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27B parameters' headers, and nothing behind them."""
    directory = tmp_path_factory.mktemp("large")
    write_sparse_checkpoint(directory)
    return directory
