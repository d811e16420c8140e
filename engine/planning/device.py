"""Devices that plans are made for: sizes and layouts of real ones, and no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from cuda.core import MemoryResource

from engine.backend.planning import MemoryLayout, PlanningBackend
from engine.backend.protocol import Backend
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.memory.resources import PlanningMemoryResource, host_capacity

__all__ = ["NoDeviceError", "PlanningDevice", "choose_planning_device"]

_CONTEXT_BYTES = 529 << 20
"""A context, its stream and the kernels: measured on an H200 with CUDA 13. Cards differ by some 100 MiB."""
_DRIVER_STEP = 2 << 20
"""cudaMalloc takes memory from the device in steps of 2 MiB; smaller requests share a step."""
_SHARED_BELOW = 1 << 20


class NoDeviceError(ConfigurationError):
    """There is no GPU here, and none was named."""


@dataclass(frozen=True, slots=True)
class PlanningDevice:
    """A `Device` whose memory is none."""

    name: str
    """of the device that the plan is for: ``cpu``, ``cuda``"""
    description: str
    """for a person: ``cpu device``, ``rtx-4090``"""
    capacity: int
    make_layout: Callable[[], MemoryLayout]
    granularity: int = 1
    shared_below: int = 0
    taken: int = 0
    """bytes that are gone before the first request, as estimated"""
    mappable: int | None = None
    """most that the system maps of the capacity; None: all of it"""

    @property
    def memory_name(self) -> str:
        """What its trace lines begin with: ``host``, ``cuda``"""
        return "host" if self.name == "cpu" else self.name

    def open_memory(self, *, observe: bool = False) -> MemoryResource:
        return PlanningMemoryResource(
            self.capacity,
            self.granularity,
            shared_below=self.shared_below,
            taken=min(self.taken, self.capacity),
            device=self.memory_name,
            mappable=self.mappable,
        )

    def can_use(self, memory: MemoryResource) -> bool:
        return True

    def open_backend(self, memory: MemoryResource) -> Backend:
        # Loader and models ask it for nothing but memory; no step is run.
        return cast(Backend, PlanningBackend(memory, self.make_layout()))

    def of_capacity(self, capacity: int, *, taken: int | None = None) -> PlanningDevice:
        """The same with another capacity."""
        return replace(self, capacity=capacity, taken=self.taken if taken is None else taken)

    def of_mappable(self, mappable: int | None) -> PlanningDevice:
        """The same where the system maps `mappable` bytes; None: all of the capacity."""
        return replace(self, mappable=mappable)


def choose_planning_device(
    config: EngineConfig, *, gpu: str | None = None, gpu_memory: int | None = None
) -> PlanningDevice:
    """What stands for the device that an engine of `config` would run on.

    Parameters
    ----------
    gpu
        A GPU of `GPUS`, to plan for one that is not here.
    gpu_memory
        Its bytes, or those that the one here is taken to have.

    Raises
    ------
    ConfigurationError
        A GPU was asked for that is neither here nor known.
    """
    if config.device == "cpu" and gpu is not None:
        raise ConfigurationError(f"--gpu {gpu}: --device is cpu; expected --device cuda")
    if config.device == "cpu":
        return _cpu(config)
    try:
        return _cuda(config, gpu, gpu_memory)
    except NoDeviceError:
        if config.device == "cuda":
            raise
        return _cpu(config)


def _cpu(config: EngineConfig) -> PlanningDevice:
    from engine.backend.cpu.planning import CpuLayout
    from engine.backend.cpu.threads import resolve_threads

    threads = resolve_threads(config.threads)
    capacity = config.device_memory or host_capacity()
    return PlanningDevice("cpu", "cpu device", capacity, lambda: CpuLayout(threads))


def _cuda(config: EngineConfig, name: str | None, memory: int | None) -> PlanningDevice:
    from engine.backend.cuda.gpus import GPUS, present_gpu
    from engine.backend.cuda.planning import CudaLayout

    if name is None:
        try:
            gpu = present_gpu()
        except (ConfigurationError, ImportError) as error:
            raise NoDeviceError(str(error)) from error
    elif name in GPUS:
        gpu = GPUS[name]
    else:
        raise ConfigurationError(f"--gpu {name}: expected one of {', '.join(GPUS)}")
    capacity = memory or gpu.total
    if capacity is None:
        raise ConfigurationError(f"--gpu {name}: expected --device-memory SIZE, what that card has")
    is_pool = config.cuda_allocator == "pool"
    return PlanningDevice(
        "cuda",
        gpu.name,
        capacity,
        lambda: CudaLayout(gpu.shape),
        granularity=512 if is_pool else _DRIVER_STEP,
        shared_below=0 if is_pool else _SHARED_BELOW,
        taken=_CONTEXT_BYTES,
    )
