"""A memory resource that was handed in from outside, made readable."""

from __future__ import annotations

from cuda.core import MemoryResource

from engine.memory.adaptors import LimitingMemoryResource, gauge_of
from engine.memory.base import DeviceGauge, Overheads

__all__ = ["CountingGauge", "adopt"]


class CountingGauge:
    """Reads a device that cannot be asked, by what went through a limit over it. A `DeviceGauge`."""

    device = "host"
    api = "host"
    exact = True

    def __init__(self, limiting: LimitingMemoryResource) -> None:
        self._limiting = limiting

    @property
    def total(self) -> int:
        return self._limiting.limit

    def read_free(self) -> int:
        return self._limiting.available

    def read_pool(self) -> tuple[int, int] | None:
        return None

    def overheads(self) -> Overheads:
        return Overheads()

    def last_retries(self) -> int:
        return 0


def adopt(memory: MemoryResource, capacity: int) -> tuple[MemoryResource, DeviceGauge]:
    """A resource to build on and a gauge to read it by.

    A resource of the memory house tells its own free bytes and is returned as it is. Any other is taken to
    have `capacity` bytes.
    """
    gauge = gauge_of(memory)
    if gauge is not None:
        return memory, gauge
    limiting = LimitingMemoryResource(memory, capacity)
    return limiting, CountingGauge(limiting)
