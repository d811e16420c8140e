"""Disks that fill, for tests."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["files_of_at_most"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit on what is written: as a full disk, it is noticed in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
