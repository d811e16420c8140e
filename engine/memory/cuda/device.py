"""One CUDA device as the ledger sees it: what the context, the libraries and the neighbours hold.

None of these bytes goes through a memory resource, so each is measured at the step that creates it: the
device's free bytes before and after, less what the house itself took meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from engine.memory.cuda.bypass import BypassBook
from engine.memory.cuda.runtime import CudaCallError, CudaRuntime, is_sticky

__all__ = ["CudaDeviceAccount", "DeviceHealth", "DriverUsage", "NvmlUsage"]


class DriverUsage(Protocol):
    """Usage as the driver's management library tells it, without a context."""

    def used(self) -> int | None:
        """Bytes in use on the whole device; None where it cannot be told."""

    def used_by_others(self) -> int | None:
        """Bytes in use by other processes; None where processes cannot be told apart."""


class NvmlUsage:
    """`DriverUsage` out of NVML, through cuda.core. Answers None wherever NVML is missing or refuses."""

    def __init__(self, device_id: int = 0) -> None:
        self._device_id = device_id

    def used(self) -> int | None:
        try:
            from cuda.core import system

            return int(system.Device(index=self._device_id).memory_info.used)
        except Exception:  # NVML's many errors all mean the same here: it cannot be told
            return None

    def used_by_others(self) -> int | None:
        try:
            from cuda.core import system

            processes = system.Device(index=self._device_id).compute_running_processes
            sizes = {int(process.pid): int(process.used_gpu_memory) for process in processes}
        except Exception:
            return None
        # Inside a container or a virtual machine the ids are another namespace's, or the sizes are unknown.
        if os.getpid() not in sizes or any(size < 0 or size >= 1 << 62 for size in sizes.values()):
            return None
        return sum(size for pid, size in sizes.items() if pid != os.getpid())


class DeviceHealth:
    """Whether the context is lost. All who use one device share it: who finds out tells the others."""

    def __init__(self) -> None:
        self.lost: CudaCallError | None = None
        """the first error after which no CUDA call can succeed"""

    def note(self, error: CudaCallError) -> None:
        """Remember `error` if the context is lost with it."""
        if self.lost is None and is_sticky(error.code):
            self.lost = error


class CudaDeviceAccount:
    """Bytes of one device that no memory resource handed out, measured as they appear.

    Parameters
    ----------
    runtime
        The device's runtime. Building the account creates the context: whatever else would create it must
        come later, or its bytes count as a neighbour's.
    usage
        The driver's own view. Without it the context cannot be told from the neighbours and counts as theirs.
    book
        Knows what went past the resources; None where nobody observes the device.
    """

    def __init__(self, runtime: CudaRuntime, usage: DriverUsage, book: BypassBook | None = None) -> None:
        self.runtime = runtime
        self.book = book
        self._usage = usage
        self.health = DeviceHealth()
        before = usage.used()
        free, self.total = runtime.memory_info()
        after = usage.used()
        held = self.total - free
        context = after - before if before is not None and after is not None else 0
        self.context = min(max(context, 0), held)
        self._neighbours_at_start = held - self.context
        self.library = 0
        self._in_step = False
        self.taken = 0
        """bytes that the house's resources hold of the device, rounding and pool slack included"""

    def free(self) -> int:
        """The driver's free bytes (cudaMemGetInfo). Raises `CudaCallError`."""
        try:
            return self.runtime.memory_info()[0]
        except CudaCallError as error:
            self.health.note(error)
            raise

    def other_processes(self) -> int:
        """Bytes that other processes hold: told by the driver, or as they were when the context was made."""
        told = self._usage.used_by_others()
        return self._neighbours_at_start if told is None else told

    def bypassed(self) -> int:
        """Bytes that went past the resources and are held, settled now; 0 where nobody observes."""
        if self.book is None:
            return 0
        self.settle()
        return self.book.live

    def settle(self, *, in_library_step: bool = False) -> None:
        """Have the book judge what was observed. Once the context is lost CUPTI is not asked either."""
        if self.book is not None and self.health.lost is None:
            self.book.settle(in_library_step=in_library_step)

    @contextmanager
    def library_step(self) -> Iterator[None]:
        """Count what appears on the device inside as the libraries': modules, handles, lazy loading.

        What the house's resources take inside is not counted. Steps nest: the outermost counts.
        """
        if self._in_step:
            yield
            return
        self._in_step = True
        self.settle()
        free, taken = self.free(), self.taken
        try:
            yield
            self.runtime.synchronize()
            self.library += (free - self.free()) - (self.taken - taken)
            self.settle(in_library_step=True)
        finally:
            self._in_step = False
