"""A model of the driver that behaves as one was measured to.

Measured on an H200 with driver 580: cudaMalloc takes 2 MiB steps that small blocks share, a pool grows in
32 MiB steps and keeps them, and a pool request that fails first grows the pool over all free memory.
"""

from __future__ import annotations

from engine.memory.cuda.resources import DRIVER_STEP
from engine.memory.cuda.runtime import OUT_OF_MEMORY, CudaCallError

MIB = 1 << 20
GIB = 1 << 30
POOL_STEP = 32 * MIB
ILLEGAL_ADDRESS = 700
CONTEXT = 527 * MIB


class ModelDriver:
    """A device of `total` bytes of which `neighbours` are taken. One pool. Counts every call."""

    def __init__(self, total: int = 24 * GIB, neighbours: int = 0) -> None:
        self.total, self.neighbours = total, neighbours
        self.blocks: dict[int, int] = {}
        self.pool_blocks: dict[int, int] = {}
        self.host_blocks: dict[int, int] = {}
        self.host_bytes = 1 << 40
        """page-locked memory that the host gives"""
        self.unobserved = 0
        """bytes freed in stream order that the pool cannot use before a synchronisation"""
        self.reserved = 0
        self.keep = 0
        self.max_size = 0
        self.next = 1 << 40
        self.broken = 0
        """error code that every call returns"""
        self.last_error = 0
        self.calls: list[str] = []
        self.context = 0

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.broken:
            self.fail(call, self.broken)

    def fail(self, call: str, code: int) -> None:
        self.last_error = code
        text = "out of memory" if code == OUT_OF_MEMORY else "an illegal memory access was encountered"
        raise CudaCallError(call, code, text)

    def _far_away(self) -> int:
        """An address that no cudaMalloc gives, and in no step of its blocks."""
        ptr = self.next + (1 << 36)
        self.next = ptr + (1 << 36)
        return ptr

    @property
    def free_bytes(self) -> int:
        steps = {
            step
            for ptr, size in self.blocks.items()
            for step in range(ptr // DRIVER_STEP, (ptr + size - 1) // DRIVER_STEP + 1)
        }
        return self.total - self.neighbours - self.context - len(steps) * DRIVER_STEP - self.reserved

    @property
    def used(self) -> int:
        return sum(self.pool_blocks.values()) + self.unobserved

    def malloc(self, size: int) -> int:
        self._enter("cudaMalloc")
        if size >= DRIVER_STEP:
            self.next = -(-self.next // DRIVER_STEP) * DRIVER_STEP
        ptr = self.next
        before = self.free_bytes
        self.blocks[ptr] = size
        if self.free_bytes < 0 or before < 0:
            del self.blocks[ptr]
            self.fail("cudaMalloc", OUT_OF_MEMORY)
        self.next = ptr + -(-size // 512) * 512
        if size >= DRIVER_STEP:
            self.next = -(-self.next // DRIVER_STEP) * DRIVER_STEP
        return ptr

    def free(self, ptr: int) -> None:
        self._enter("cudaFree")
        del self.blocks[ptr]

    def host_malloc(self, size: int) -> int:
        self._enter("cudaHostAlloc")
        if sum(self.host_blocks.values()) + size > self.host_bytes:
            self.fail("cudaHostAlloc", OUT_OF_MEMORY)
        ptr = self._far_away()
        self.host_blocks[ptr] = size
        return ptr

    def host_free(self, ptr: int) -> None:
        self._enter("cudaFreeHost")
        del self.host_blocks[ptr]

    def pool_malloc(self, size: int, pool: object, stream: int) -> int:
        self._enter("cudaMallocFromPoolAsync")
        if self.max_size and self.used + size > self.max_size:
            self.fail("cudaMallocFromPoolAsync", OUT_OF_MEMORY)
        missing = self.used + size - self.reserved
        if missing > 0:
            growth = -(-missing // POOL_STEP) * POOL_STEP
            if growth > self.free_bytes:
                self.reserved += max(self.free_bytes, 0)
                self.fail("cudaMallocFromPoolAsync", OUT_OF_MEMORY)
            self.reserved += growth
        ptr = self._far_away()
        self.pool_blocks[ptr] = size
        return ptr

    def pool_free(self, ptr: int, stream: int) -> None:
        self._enter("cudaFreeAsync")
        self.unobserved += self.pool_blocks.pop(ptr)

    def pool_create(self, max_size: int) -> object:
        self._enter("cudaMemPoolCreate")
        self.max_size = max_size
        return object()

    def pool_destroy(self, pool: object) -> None:
        self._enter("cudaMemPoolDestroy")
        self.reserved = 0

    def pool_keep(self, pool: object, threshold: int) -> None:
        self._enter("cudaMemPoolSetAttribute")
        self.keep = threshold

    def pool_bytes(self, pool: object) -> tuple[int, int]:
        self._enter("cudaMemPoolGetAttribute")
        return self.used, self.reserved

    def pool_trim(self, pool: object) -> None:
        self._enter("cudaMemPoolTrimTo")
        self.reserved = -(-self.used // POOL_STEP) * POOL_STEP

    def memory_info(self) -> tuple[int, int]:
        self._enter("cudaMemGetInfo")
        self.context = CONTEXT
        return max(self.free_bytes, 0), self.total

    def synchronize(self) -> None:
        self._enter("cudaDeviceSynchronize")
        self.unobserved = 0

    def clear_last_error(self) -> int:
        self.calls.append("cudaGetLastError")
        code, self.last_error = self.last_error, 0
        return code


class ModelUsage:
    """What the management library says of the model driver."""

    def __init__(self, driver: ModelDriver, *, tells_processes: bool = True) -> None:
        self.driver, self.tells_processes = driver, tells_processes

    def used(self) -> int | None:
        return self.driver.total - self.driver.free_bytes

    def used_by_others(self) -> int | None:
        return self.driver.neighbours if self.tells_processes else None
