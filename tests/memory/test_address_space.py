"""What the system maps for a process, as it says itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.memory.address_space import AddressSpace

GIB = 1 << 30
MEMINFO = """MemTotal:       2097152 kB
SwapTotal:      1048576 kB
HugePages_Total:       0
CommitLimit:    4194304 kB
Committed_AS:   1048576 kB
"""


@contextmanager
def limit_of(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def proc(directory: Path, overcommit: int, meminfo: str = MEMINFO) -> Path:
    (directory / "sys/vm").mkdir(parents=True)
    (directory / "sys/vm/overcommit_memory").write_text(f"{overcommit}\n")
    (directory / "meminfo").write_text(meminfo)
    return directory


def test_a_limit_leaves_what_is_not_mapped() -> None:
    free = AddressSpace.read()
    assert free.mapped > 1 << 20
    assert free.left(1000) <= 999
    with limit_of(free.mapped + GIB):
        space = AddressSpace.read()
    assert space.limit == free.mapped + GIB
    assert GIB - (64 << 20) < space.left(1 << 40) < GIB


@pytest.mark.parametrize(("overcommit", "left"), [(0, 3 * GIB), (1, (1 << 40) - 1), (2, 3 * GIB)])
def test_overcommit(tmp_path: Path, overcommit: int, left: int) -> None:
    space = AddressSpace.read(proc(tmp_path, overcommit))
    assert (space.overcommit, space.left(1 << 40)) == (overcommit, left)
    assert space.left(10) == 9, "it was refused"


@pytest.mark.parametrize("meminfo", ["", "MemTotal: many kB", "MemTotal:", "MemTotal: 1 kB"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, meminfo: str) -> None:
    assert AddressSpace.read(proc(tmp_path, 2, meminfo)).left(100) == 99
    assert AddressSpace.read(tmp_path / "nowhere").left(100) == 99
