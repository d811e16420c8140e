"""Shapes of GPUs: of the one that is there, asked without making a context, and of some that are not.

Multiprocessors are those of the data sheets; shared memory of a block is the compute capability's (CUDA C++
Programming Guide, "Technical Specifications per Compute Capability").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.backend.cuda.layout import DeviceShape
from engine.backend.cuda.requirements import check_device

__all__ = ["GPUS", "Gpu", "present_gpu"]

_AMPERE = 163 << 10
_SMALL = 99 << 10
_LARGE = 227 << 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as far as a plan needs to know it."""

    name: str
    shape: DeviceShape
    total: int | None = None
    """bytes, where it was asked"""


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a100", DeviceShape(108, _AMPERE, hopper=False)),
            Gpu("l4", DeviceShape(58, _SMALL, hopper=False)),
            Gpu("l40s", DeviceShape(142, _SMALL, hopper=False)),
            Gpu("rtx-4090", DeviceShape(128, _SMALL, hopper=False)),
            Gpu("rtx-5090", DeviceShape(170, _SMALL, hopper=False)),
            Gpu("h100", DeviceShape(132, _LARGE, hopper=True)),
            Gpu("h200", DeviceShape(132, _LARGE, hopper=True)),
            Gpu("b200", DeviceShape(148, _LARGE, hopper=False)),
        )
    }
)
"""by name"""


def present_gpu(index: int = 0) -> Gpu:
    """The GPU `index` of this machine. Makes no context.

    Raises
    ------
    ConfigurationError
        There is no usable one.
    """
    total = check_device(index)
    from cuda.bindings import driver

    attributes = driver.CUdevice_attribute

    def ask(attribute: driver.CUdevice_attribute) -> int:
        _, value = driver.cuDeviceGetAttribute(attribute, index)
        return int(value)

    capability = (
        ask(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        ask(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    )
    shape = DeviceShape(
        multiprocessors=ask(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        shared_bytes=ask(attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        hopper=capability == (9, 0),
    )
    _, name = driver.cuDeviceGetName(64, index)
    return Gpu(name.rstrip(b"\0").decode(errors="replace"), shape, total)
