"""The memory branch of the exception tree, its root, and what a failed allocation knows about itself.

The root and `ConfigurationError` live here because the memory house imports nothing else of `engine`;
`engine.errors` draws the whole tree and re-exports them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "AllocationError",
    "AllocationRequest",
    "ConfigurationError",
    "OutOfMemoryError",
    "StickyDeviceError",
    "TraceFileError",
    "UnknownPointerError",
    "VtserveError",
    "Why",
]


class VtserveError(Exception):
    """Root of every error that vtserve raises on purpose. Its text is one line that a user can act on."""


class ConfigurationError(VtserveError):
    """A flag, environment variable or configuration field has a value that cannot be used."""


class TraceFileError(VtserveError):
    """A flight recorder's file cannot be created or read: missing, truncated, foreign, of another version."""


class Why(enum.Enum):
    """Why a request to a memory resource failed. The value is what the trace prints after ``why=``."""

    FULL = "full"
    """The device has fewer free bytes than were asked for."""
    FRAGMENTATION = "fragmentation"
    """Enough bytes are free, but not in one piece, or frees have not been observed by the pool yet."""
    ADDRESS_SPACE = "address-space"
    """The bytes may be there, but the system would not map them (address space, overcommit)."""
    CAP = "cap"
    """A limit that vtserve was told to keep, below what the device has."""
    NEIGHBOUR = "neighbour"
    """Another process holds the bytes."""
    EARLIER_ERROR = "earlier-error"
    """An earlier asynchronous error, reported by this call; the request itself is not to blame."""
    INJECTED = "injected"
    """A test asked for the failure."""


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """One request to a memory resource that failed: what was asked, where, and how the device stood then."""

    size: int
    """bytes asked for"""
    api: str = "host"
    """the call that failed: ``host``, ``malloc``, ``async``, ``plan``"""
    tag: str = "other"
    """the memory scope, ``weights/model.layers.3.mlp.gate_proj``"""
    site: str = ""
    """``file:line`` of the first frame outside the memory house"""
    sequence: int | None = None
    """``#N``: the request's number in the trace; None when tracing is off"""
    why: Why = Why.FULL
    error: str = "out of memory"
    """the driver's (or the resource's) own text"""
    free: int | None = None
    """free bytes of the device when it failed, read and not estimated; None when they could not be read"""
    live: int | None = None
    """bytes that were live in the resource that failed"""
    requests: tuple[str, ...] = ()
    """ids of the serving requests in the step, if one was running"""
    error_code: int = 0
    """the driver's error number, 0 when there is none"""

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for a JSON failure record."""
        return {
            "api": self.api,
            "size": self.size,
            "tag": self.tag,
            "site": self.site,
            "sequence": self.sequence,
            "why": self.why.value,
            "error": self.error,
            "error_code": self.error_code,
            "free": self.free,
            "live": self.live,
            "requests": list(self.requests),
        }


class AllocationError(VtserveError):
    """A request to a memory resource failed.

    Attributes
    ----------
    request : AllocationRequest
        What failed. An adaptor further out may complete it (the tracing adaptor adds its ``#N``) while the
        exception passes; the text follows.
    """

    def __init__(self, request: AllocationRequest) -> None:
        super().__init__(request)
        self.request = request

    def complete(self, **known: Any) -> None:
        """Replace fields of `request` that only an outer adaptor knows."""
        self.request = replace(self.request, **known)

    def __reduce__(self) -> tuple[type[AllocationError], tuple[AllocationRequest]]:
        return type(self), (self.request,)

    def __str__(self) -> str:
        request = self.request
        number = "" if request.sequence is None else f" #{request.sequence}"
        parts = [f"allocation{number} of {describe_bytes(request.size)} failed: {request.error}"]
        parts.append(f"why={request.why.value} api={request.api}")
        if request.live is not None:
            parts.append(f"live={describe_bytes(request.live)}")
        if request.free is not None:
            parts.append(f"free={describe_bytes(request.free)}")
        parts.append(f"tag={request.tag}")
        if request.site:
            parts.append(f"site={request.site}")
        if request.requests:
            parts.append(f"requests={','.join(request.requests)}")
        return f"{parts[0]} ({', '.join(parts[1:])})"

    # Read far from here (failure record, levers, command line): spare the readers a hop.

    @property
    def size(self) -> int:
        return self.request.size

    @property
    def api(self) -> str:
        return self.request.api

    @property
    def tag(self) -> str:
        return self.request.tag

    @property
    def site(self) -> str:
        return self.request.site

    @property
    def sequence(self) -> int | None:
        return self.request.sequence

    @property
    def why(self) -> Why:
        return self.request.why

    @property
    def free(self) -> int | None:
        return self.request.free

    @property
    def live(self) -> int | None:
        return self.request.live


class OutOfMemoryError(AllocationError):
    """The bytes are not there. The device is still usable: free something, or turn a lever, and ask again."""


class StickyDeviceError(AllocationError):
    """The CUDA context is lost. No further CUDA call may be made; only a new process goes on."""


class UnknownPointerError(VtserveError):
    """A free of a pointer that is not live: freed twice, never ours, or of another size. Nothing changed."""

    def __init__(self, ptr: int, size: int, live_size: int | None = None) -> None:
        super().__init__(ptr, size, live_size)
        self.ptr = ptr
        self.size = size
        self.live_size = live_size

    def __str__(self) -> str:
        if self.live_size is None:
            return f"cannot free {self.size} bytes at {self.ptr:#x}: not allocated here, or already freed"
        return f"cannot free {self.size} bytes at {self.ptr:#x}: {self.live_size} bytes are allocated there"


def describe_bytes(count: int) -> str:
    """`count` bytes for a person: ``606.0 MiB``, ``1.50 GiB``, ``96 B``."""
    magnitude = abs(count)
    if magnitude < 1 << 10:
        return f"{count} B"
    if magnitude < 1 << 20:
        return f"{count / (1 << 10):.1f} KiB"
    if magnitude < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.2f} GiB"
