"""Description of a failed request, gathered where it fails out of the scope."""

from __future__ import annotations

from typing import Any

from engine.memory.errors import AllocationRequest
from engine.memory.scope import call_site, current_requests, current_tag

__all__ = ["failed_request"]


def failed_request(size: int, **facts: Any) -> AllocationRequest:
    """The request for `size` bytes that fails now, completed by `facts` (fields of `AllocationRequest`).

    A failure is rare, so the scope is read here even with tracing off: the error alone tells who asked.
    """
    return AllocationRequest(
        size=size, tag=current_tag(), site=call_site(), requests=current_requests(), **facts
    )
