"""What the CUDA backend needs of a machine, and one line for whoever lacks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.backend.cuda.compiler import architecture
from engine.errors import ConfigurationError

if TYPE_CHECKING:
    from cuda.core import Device

MINIMUM_DRIVER = (13, 0)
"""the CUDA version a driver must know: cuda.core and the compiler are of that generation"""


def check_device(index: int) -> int:
    """See that there is a driver and a device that can be used: the device's bytes. Creates no context.

    Raises
    ------
    ConfigurationError
        If there is no driver, there is no such GPU, or either is too old.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigurationError(
            "--device cuda: cuda-bindings is needed; pip install 'vtserve[cuda]'"
        ) from error
    try:
        status, version = driver.cuDriverGetVersion()
        (initialized,) = driver.cuInit(0)
    except RuntimeError as error:  # the driver library is absent
        raise ConfigurationError(f"--device cuda: no NVIDIA driver was found ({error})") from error
    found = (version // 1000, version % 1000 // 10) if int(status) == 0 else (0, 0)
    if found < MINIMUM_DRIVER:
        knows, needed = (".".join(map(str, pair)) for pair in (found, MINIMUM_DRIVER))
        raise ConfigurationError(f"--device cuda: the driver knows CUDA {knows}, {needed} or newer is needed")
    if int(initialized) != 0:
        raise ConfigurationError(f"--device cuda: the driver finds no usable GPU ({initialized.name})")
    _, count = driver.cuDeviceGetCount()
    if index >= count:
        raise ConfigurationError(f"--device cuda: GPU {index} was asked for, the driver finds {count}")
    _, handle = driver.cuDeviceGet(index)
    attributes = driver.CUdevice_attribute
    _, major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
    _, minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
    architecture((major, minor))  # refuses what is too old for the kernels
    _, total = driver.cuDeviceTotalMem(handle)
    return int(total)


def open_device(index: int) -> Device:
    """The device, made current. Raises as `check_device` does."""
    check_device(index)
    from cuda.core import Device

    device = Device(index)
    device.set_current()
    return device
