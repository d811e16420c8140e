"""What the system maps for this process: its limit on address space, and how it overcommits memory."""

from __future__ import annotations

import mmap
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["AddressSpace"]

_KEPT = 32 << 20
_NEEDED = {"MemTotal", "SwapTotal", "CommitLimit", "Committed_AS"}


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """Sizes are bytes."""

    limit: int | None
    """`ulimit -v` of this process; None: there is none"""
    mapped: int
    """counts against `limit`"""
    overcommit: int
    """``vm.overcommit_memory``: 0 refuses what is obviously too much, 1 nothing, 2 what goes over a limit"""
    uncommitted: int | None
    """what is left of the limit that overcommit 2 keeps; None: there is none"""
    largest: int | None
    """what overcommit 0 takes for too much in one request; None: there is no such size"""

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> Self:
        """As it is now. What cannot be read counts as no limit."""
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        overcommit = _number(proc / "sys/vm/overcommit_memory")
        sizes = _sizes(proc / "meminfo")
        return cls(
            limit=None if limit == resource.RLIM_INFINITY else limit,
            mapped=_number(proc / "self/statm") * mmap.PAGESIZE,
            overcommit=overcommit,
            uncommitted=sizes["CommitLimit"] - sizes["Committed_AS"] if overcommit == 2 and sizes else None,
            largest=sizes["MemTotal"] + sizes["SwapTotal"] if overcommit == 0 and sizes else None,
        )

    def left(self, refused: int) -> int:
        """Bytes that may be mapped still, as far as is known; less than the `refused` ones of a request.

        Some are kept for what else the process asks for, and for the boundaries of pages.
        """
        lefts = [refused - 1]
        if self.limit is not None:
            lefts.append(self.limit - self.mapped - _KEPT)
        lefts += [size for size in (self.uncommitted, self.largest) if size is not None]
        return max(min(lefts), 0)


def _number(file: Path) -> int:
    """The first number in a file; 0 if there is none."""
    try:
        return int(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _sizes(meminfo: Path) -> dict[str, int]:
    """Bytes by name; nothing where they cannot be read."""
    try:
        lines = meminfo.read_text().splitlines()
        entries = (line.partition(":") for line in lines)
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in entries}
        return sizes if sizes.keys() >= _NEEDED else {}
    except (OSError, ValueError, IndexError):
        return {}
