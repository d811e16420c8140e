"""A backend around another that remembers what was loaded, so that an error during a load arrives."""

from __future__ import annotations

from typing import Any, TypeVar

from engine.backend.protocol import Backend
from engine.memory.scope import allocation_helper

__all__ = ["KeepingBackend"]

T = TypeVar("T")


class KeepingBackend:
    """A backend that remembers what was loaded, for as long as the load takes.

    cuda.core's buffers must not be destroyed by an exception on its way up: its callback then runs into the
    pending exception, loses it, and does not free the buffer. So a half-built model must not hold the only
    reference. What is kept is let go when the exception has been caught.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: list[object] = []

    @allocation_helper
    def empty(self, *arguments: Any) -> object:
        return self._keep(self._backend.empty(*arguments))

    @allocation_helper
    def from_host(self, *arguments: Any) -> object:
        return self._keep(self._backend.from_host(*arguments))

    @allocation_helper
    def load_linear(self, *arguments: Any) -> object:
        return self._keep(self._backend.load_linear(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _keep(self, loaded: T) -> T:
        self._kept.append(loaded)
        return loaded
