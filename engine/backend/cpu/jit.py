"""How the CPU backend's kernels are compiled and where the machine code is kept.

Kernels are compiled by numba when they are first called, for the types of that call, and kept on disk. numba looks
for a changed source only in the file of the kernel itself; a kernel that calls a function of another file would go
on with the old one. Here a kernel is fresh only if no file of this package has changed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache

__all__ = ["CONTRACT", "REASSOCIATE", "kernel"]

_log = logging.getLogger(__name__)

CONTRACT = frozenset({"contract"})
"""``a * b + c`` may become one fused operation. NaN, infinities and the order of operations stay as written."""

REASSOCIATE = frozenset({"contract", "nsz", "reassoc"})
"""Sums may be computed in any order, which is what lets a reduction use vector registers."""


def kernel(*, parallel: bool = False, fastmath: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for the CPU, without the interpreter's lock. Dividing by zero gives what IEEE 754 says.

    Parameters
    ----------
    parallel
        ``prange`` loops run on numba's threads. They must not be nested: not every threading layer can do that.
    fastmath
        LLVM's fast-math flags: `CONTRACT`, `REASSOCIATE` or nothing.
    """

    def compile_function(function: Callable[..., Any]) -> Any:
        flags = set(fastmath) or False
        # numba's own error model branches at every division, and no loop with a branch uses vector registers.
        compiled = numba.njit(parallel=parallel, nogil=True, fastmath=flags, error_model="numpy")(function)
        try:
            compiled._cache = _KernelCache(function)
        except (RuntimeError, OSError) as error:
            # Neither beside the source nor in the user's cache directory; NUMBA_CACHE_DIR may name another.
            _warn_uncached(str(error))
        return compiled

    return compile_function


class _PackageLocator:
    """Where numba would keep the code, stamped with all sources of this package."""

    def __init__(self, locator: Any) -> None:
        self._locator = locator

    def get_source_stamp(self) -> bytes:
        return _package_stamp()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locator, name)


class _KernelCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]  # numba has no types
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._locator = _PackageLocator(self._locator)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _KernelCacheImpl


@lru_cache(maxsize=1)
def _package_stamp() -> bytes:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.digest()


@lru_cache(maxsize=1)
def _warn_uncached(reason: str) -> None:
    _log.warning("compiled kernels are not kept: %s (NUMBA_CACHE_DIR names a directory for them)", reason)
