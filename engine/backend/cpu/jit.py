"""How the CPU backend's kernels are compiled and where the machine code is kept.

Kernels are compiled by numba when they are first called, for the types of that call, and kept on disk. numba
looks for a changed source only in the file of the kernel itself; a kernel that calls a function of another
file would go on with the old one. Here a kernel is fresh only if none of this package's modules that its own
imports has changed either.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache

__all__ = ["CONTRACT", "kernel"]

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parent

CONTRACT = frozenset({"contract"})
"""``a * b + c`` may become one fused operation. NaN, infinities and the order stay as written.

Not for ``a * b + c * d``: which product is fused is the compiler's choice, and may differ between the kernels
that a function is inlined into. Nor may sums be reordered anywhere, for the same reason: one thread and many
give the same bits.
"""


def kernel(*, parallel: bool = False, fastmath: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for the CPU. It runs without the interpreter's lock and divides as IEEE 754 says.

    Parameters
    ----------
    parallel
        ``prange`` loops run on numba's threads. They must not be nested: not every threading layer can do
        that.
    fastmath
        LLVM's fast-math flags: `CONTRACT` or nothing.
    """

    def compile_function(function: Callable[..., Any]) -> Any:
        flags = set(fastmath) or False
        # numba's own error model branches at every division, and no loop with a branch uses vector registers.
        options: dict[str, Any] = {"parallel": parallel, "fastmath": flags, "error_model": "numpy"}
        compiled: Any = numba.njit(nogil=True, **options)(function)
        try:
            compiled._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
        except (RuntimeError, OSError):  # neither beside the source nor in the user's cache directory
            _warn_uncached()
        return compiled

    return compile_function


class _StampedLocator:
    """Where numba would keep the code, with a stamp of all sources that may be in it."""

    def __init__(self, locator: Any, source: Path) -> None:
        self._locator = locator
        self._source = source

    def get_source_stamp(self) -> bytes:
        digest = hashlib.sha256()
        for source in sorted(_sources(self._source)):
            digest.update(_digest(source))
        return digest.digest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locator, name)


class _KernelCacheImpl(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._locator = _StampedLocator(self._locator, Path(inspect.getfile(function)))


class _KernelCache(FunctionCache):
    _impl_class = _KernelCacheImpl

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:  # the disk is full
            _warn_uncached()


@lru_cache(maxsize=256)
def _digest(source: Path) -> bytes:
    return hashlib.sha256(source.read_bytes()).digest()


@lru_cache(maxsize=256)
def _imports(source: Path) -> frozenset[Path]:
    """The modules of this package that `source` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            names.add(f"{node.module}")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    paths = (_PACKAGE / f"{name.removeprefix(f'{__package__}.')}.py" for name in names)
    return frozenset(path for path in paths if path.is_file())


def _sources(source: Path) -> set[Path]:
    """`source`, and the modules of this package that it imports, directly or not."""
    found, open_ends = {source}, [source]
    while open_ends:
        fresh = _imports(open_ends.pop()) - found
        found |= fresh
        open_ends.extend(fresh)
    return found


@lru_cache(maxsize=1)
def _warn_uncached() -> None:
    _log.warning(
        "compiled kernels cannot be kept beside %s or in the user's cache directory, and will be compiled at "
        "each start; NUMBA_CACHE_DIR can name a directory for them",
        _PACKAGE,
    )
