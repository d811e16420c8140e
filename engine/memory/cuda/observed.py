"""The runtime's calls, each entered in a book, so that what an observer sees of them is known to be ours."""

from __future__ import annotations

from typing import Any

from engine.memory.cuda.bypass import BypassBook
from engine.memory.cuda.runtime import CudaRuntime

__all__ = ["ObservedCudaRuntime"]


class ObservedCudaRuntime:
    """A `CudaRuntime` that tells `book` of device memory that is asked for and given back through it."""

    def __init__(self, runtime: CudaRuntime, book: BypassBook) -> None:
        self._runtime = runtime
        self._book = book

    def malloc(self, size: int) -> int:
        with self._book.asking():
            ptr = self._runtime.malloc(size)
            self._book.expect(ptr, size)
        return ptr

    def free(self, ptr: int) -> None:
        self._book.expect_release(ptr)
        self._runtime.free(ptr)

    def pool_malloc(self, size: int, pool: Any, stream: int) -> int:
        with self._book.asking():
            ptr = self._runtime.pool_malloc(size, pool, stream)
            self._book.expect(ptr, size)
        return ptr

    def pool_free(self, ptr: int, stream: int) -> None:
        self._book.expect_release(ptr)
        self._runtime.pool_free(ptr, stream)

    def host_malloc(self, size: int) -> int:
        with self._book.asking():
            return self._runtime.host_malloc(size)

    # What neither takes nor gives device memory goes through as it is.

    def host_free(self, ptr: int) -> None:
        self._runtime.host_free(ptr)

    def pool_create(self, max_size: int) -> Any:
        return self._runtime.pool_create(max_size)

    def pool_destroy(self, pool: Any) -> None:
        self._runtime.pool_destroy(pool)

    def pool_keep(self, pool: Any, threshold: int) -> None:
        self._runtime.pool_keep(pool, threshold)

    def pool_bytes(self, pool: Any) -> tuple[int, int]:
        return self._runtime.pool_bytes(pool)

    def pool_trim(self, pool: Any) -> None:
        self._runtime.pool_trim(pool)

    def memory_info(self) -> tuple[int, int]:
        return self._runtime.memory_info()

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def clear_last_error(self) -> int:
        return self._runtime.clear_last_error()
