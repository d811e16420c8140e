"""What every adaptor is: a resource over an upstream one, with the upstream's properties."""

from __future__ import annotations

from cuda.core import MemoryResource

from engine.memory.base import DeviceGauge, ForeignMemoryResource, PointerResource

__all__ = ["MemoryAdaptor", "gauge_of"]


class MemoryAdaptor(PointerResource):
    """A resource over `upstream`, which may be any `MemoryResource`. Subclasses give `acquire` and `release`.

    `release` must call the upstream first and count afterwards, and must forget the pointer *before* the
    upstream gets it back: another thread may be given the same address at once.
    """

    def __init__(self, upstream: MemoryResource) -> None:
        self.upstream = upstream
        self._upstream = (
            upstream if isinstance(upstream, PointerResource) else ForeignMemoryResource(upstream)
        )
        self._is_device_accessible = bool(upstream.is_device_accessible)
        self._is_host_accessible = bool(upstream.is_host_accessible)
        self._device_id = int(upstream.device_id)

    @property
    def is_device_accessible(self) -> bool:
        return self._is_device_accessible

    @property
    def is_host_accessible(self) -> bool:
        return self._is_host_accessible

    @property
    def is_managed(self) -> bool:
        return bool(self.upstream.is_managed)

    @property
    def device_id(self) -> int:
        return self._device_id


def gauge_of(resource: MemoryResource) -> DeviceGauge | None:
    """The gauge at the bottom of a stack of adaptors; None if the resource there is not one."""
    while isinstance(resource, MemoryAdaptor):
        resource = resource.upstream
    return resource if isinstance(resource, DeviceGauge) else None
