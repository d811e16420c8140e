"""Small checkpoints that other tools wrote, with reference outputs."""

from __future__ import annotations

from pathlib import Path, PosixPath

import pytest

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "checkpoints"
_OWN = Path(__file__).resolve().parent / "data" / "checkpoints"


class CheckpointsPath(PosixPath):
    """The directory of checkpoints, or of one model's. A test that asks for one that is not here is skipped;
    what is asked for, ``MODEL/CHECKPOINT`` or ``MODEL/ref-….json``, is a path as any other.
    """

    def __truediv__(self, key: str) -> Path:  # type: ignore[override]
        path = super().__truediv__(key)
        if not path.exists():
            pytest.skip(f"{path.relative_to(CHECKPOINTS)} is in shared/checkpoints only, which is not here")
        return path if path.parent == CHECKPOINTS else Path(path)


CHECKPOINTS = CheckpointsPath(_SHARED if _SHARED.is_dir() else _OWN)
"""shared/checkpoints beside this checkout, else the few of them that come with it"""
