"""The ledger: whose every byte of the device is, closing to the total exactly.

::

    total = free + Σ tags + pool slack + rounding + context + library + other processes + bypass + residual

All are signed. The residual is what the other entries leave over. It is shown, never hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from engine.memory.base import Overheads

__all__ = ["Ledger"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes of one device at one moment."""

    total: int
    free: int
    tags: Mapping[str, int] = field(default_factory=dict)
    """live bytes by full tag; empty when nothing counts them"""
    pool_slack: int = 0
    """reserved by the pool and not used"""
    rounding: int = 0
    context: int = 0
    library: int = 0
    other_processes: int = 0
    bypass: int = 0
    """went past the allocator; 0 where nobody observes the device"""
    moment: str = ""
    """when it was taken: ``after load``, ``at failure``"""
    device: str = "host"
    free_is_read: bool = True
    """False: the device could not be asked, and `free` is what the other entries leave"""

    @classmethod
    def close(
        cls,
        *,
        total: int,
        free: int,
        tags: Mapping[str, int],
        overheads: Overheads,
        moment: str = "",
        device: str = "host",
        free_is_read: bool = True,
    ) -> Self:
        """A ledger out of what was measured."""
        return cls(
            total=total,
            free=free,
            tags=dict(tags),
            pool_slack=overheads.pool_slack,
            rounding=overheads.rounding,
            context=overheads.context,
            library=overheads.library,
            other_processes=overheads.other_processes,
            bypass=overheads.bypass,
            moment=moment,
            device=device,
            free_is_read=free_is_read,
        )

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """The ledger that `to_dict` was told of."""
        return cls(**{field.name: entries[field.name] for field in fields(cls)})

    @property
    def tagged(self) -> int:
        """Live bytes of all tags."""
        return sum(self.tags.values())

    @property
    def segments(self) -> dict[str, int]:
        """Live bytes by the tags' first segments, largest first."""
        totals: dict[str, int] = {}
        for tag, size in self.tags.items():
            segment = tag.partition("/")[0]
            totals[segment] = totals.get(segment, 0) + size
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def residual(self) -> int:
        """What nobody accounts for. Negative: more is accounted for than the device has."""
        known = self.pool_slack + self.rounding + self.context + self.library + self.other_processes
        return self.total - self.free - self.tagged - known - self.bypass

    def entries(self) -> dict[str, int]:
        """Free, the segments, the overheads and the residual: they add up to the total."""
        return {
            "free": self.free,
            **self.segments,
            "pool slack": self.pool_slack,
            "rounding": self.rounding,
            "context": self.context,
            "library": self.library,
            "other processes": self.other_processes,
            "bypass": self.bypass,
            "residual": self.residual,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            "moment": self.moment,
            "device": self.device,
            "total": self.total,
            "free": self.free,
            "free_is_read": self.free_is_read,
            "segments": self.segments,
            "tags": dict(self.tags),
            "pool_slack": self.pool_slack,
            "rounding": self.rounding,
            "context": self.context,
            "library": self.library,
            "other_processes": self.other_processes,
            "bypass": self.bypass,
            "residual": self.residual,
        }

    def render(self) -> str:
        """A table for a person: MiB with the bytes beside them, without entries of 0 but for the residual."""
        rows = {name: size for name, size in self.entries().items() if size or name == "residual"}
        rows["total"] = self.total
        title = f"memory of the {self.device} device" + (f", {self.moment}" if self.moment else "")
        title += "" if self.free_is_read else " (free is an estimate)"
        name_width = max(map(len, rows))
        size_width = max(len(f"{size:,}") for size in rows.values())
        lines = [title]
        for name, size in rows.items():
            if name == "total":
                lines.append("-" * (name_width + size_width + 23))
            lines.append(f"{name:<{name_width}}  {size / _MIB:>14,.1f} MiB  {size:>{size_width},}")
        return "\n".join(lines)
