"""Who is asking: the memory scope (tag), the serving requests in the step, and the line of code.

Tags and request ids are context variables: they follow asyncio tasks and do not leak between threads.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TypeVar

__all__ = [
    "FIRST_SEGMENTS",
    "allocation_helper",
    "allocation_library",
    "call_site",
    "current_requests",
    "current_tag",
    "memory_scope",
    "request_scope",
]

FIRST_SEGMENTS = ("weights", "repack", "kv", "workspace", "graph", "io", "other")
"""What a tag may begin with."""

_tag: ContextVar[str] = ContextVar("vtserve_memory_tag", default="other")
_requests: ContextVar[tuple[str, ...]] = ContextVar("vtserve_memory_requests", default=())

current_tag: Callable[[], str] = _tag.get
"""The tag of the innermost `memory_scope`, ``"other"`` outside of any."""

current_requests: Callable[[], tuple[str, ...]] = _requests.get
"""The ids of the innermost `request_scope`, ``()`` outside of any."""


@contextmanager
def memory_scope(tag: str) -> Iterator[str]:
    """Name what is allocated inside: ``with memory_scope("weights/model.layers.3.mlp.gate_proj"): …``.

    Scopes nest by replacing the tag. Characters that would break a trace line (white space, control
    characters) are replaced by ``?``: tensor names come from files that we did not write.

    Raises
    ------
    ValueError
        If the first segment is none of `FIRST_SEGMENTS`.
    """
    token = _tag.set(_checked_tag(tag))
    try:
        yield tag
    finally:
        _tag.reset(token)


@contextmanager
def request_scope(ids: Iterable[str]) -> Iterator[None]:
    """Name the serving requests of the step that runs inside."""
    token = _requests.set(tuple(_printable(request) for request in ids))
    try:
        yield
    finally:
        _requests.reset(token)


@lru_cache(maxsize=4096)
def _checked_tag(tag: str) -> str:
    if tag.partition("/")[0] not in FIRST_SEGMENTS:
        raise ValueError(f"memory tag {tag!r} must begin with one of {', '.join(FIRST_SEGMENTS)}")
    return _printable(tag)


_BREAKS_A_LINE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _printable(text: str) -> str:
    return _BREAKS_A_LINE.sub("?", text)


# -- call sites --------------------------------------------------------------------------------------------

_HOUSE = str(Path(__file__).resolve().parent)
_TREE = str(Path(__file__).resolve().parents[2])
_MOST_SITES = 4096

F = TypeVar("F", bound=Callable[..., object])

# Caches and marks about code objects, which are as immutable and as global as the code itself. A code object
# hashes by content, slowly, so they are kept by identity; the value holds the code object, so that its
# identity stays taken.
_outside: dict[str, bool] = {}
_libraries: list[str] = []
_helpers: dict[int, CodeType] = {}
_sites: dict[tuple[int, int], tuple[CodeType, str]] = {}


def allocation_helper(function: F) -> F:
    """Mark a function that only passes a request on (``Backend.empty``): the call site is its caller."""
    code = function.__code__
    _helpers[id(code)] = code
    return function


def allocation_library(package: ModuleType) -> None:
    """Mark a package whose lines only pass requests on (CuPy, numba): the call site is what calls it."""
    folder = str(package.__path__[0])  # as code objects have it: links are not followed
    if folder not in _libraries:
        _libraries.append(folder)
        _outside.clear()


def call_site() -> str:
    """``file:line`` of the first frame outside the memory house and what is marked, relative to the tree."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        outside = _outside.get(code.co_filename)
        if outside is None:
            outside = _is_outside(code.co_filename)
        if outside and id(code) not in _helpers:
            # f_lineno decodes the line table from its start; f_lasti is a plain integer.
            key = (id(code), frame.f_lasti)
            known = _sites.get(key)
            if known is not None:
                return known[1]
            return _remember(key, frame)
        frame = frame.f_back
    return ""


def _is_outside(filename: str) -> bool:
    outside = filename != contextmanager.__code__.co_filename and not any(
        filename.startswith(folder + os.sep) for folder in (_HOUSE, *_libraries)
    )
    if len(_outside) < _MOST_SITES:
        _outside[filename] = outside
    return outside


def _remember(key: tuple[int, int], frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    if filename.startswith(_TREE + "/"):
        filename = filename[len(_TREE) + 1 :]
    site = _printable(f"{filename}:{frame.f_lineno}")
    if len(_sites) >= _MOST_SITES:
        _sites.clear()
    _sites[key] = (frame.f_code, site)
    return site
