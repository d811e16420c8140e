"""What is recorded of a failure: one JSON file, for a person and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.levers import Lever
from engine.memory.causes import CAUSES
from engine.memory.errors import AllocationRequest
from engine.memory.lines import format_line
from engine.memory.record import EventKind, EventState, TraceEvent
from engine.sampling_params import SamplingParams

__all__ = [
    "ExceptionRecord",
    "FailureRecord",
    "RequestRecord",
    "StepRecord",
    "allocation_record",
    "failed_line",
    "read_failure",
]


class ExceptionRecord(msgspec.Struct, kw_only=True):
    """The exception that was thrown."""

    type: str
    message: str
    traceback: list[str]


class RequestRecord(msgspec.Struct, kw_only=True):
    """A serving request that was in the step."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int | None = None
    """with K and V in the cache; None if only the engine that died knew"""
    blocks: int | None = None
    """of the KV cache; None likewise"""
    params: SamplingParams
    prompt_token_ids: list[int] | None = None
    """only where prompts are recorded"""
    prompt: str | None = None
    """only where prompts are recorded"""


class StepRecord(msgspec.Struct, kw_only=True):
    """The step that failed."""

    step: int
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int


class FailureRecord(msgspec.Struct, kw_only=True):
    """Everything that is known about one failure."""

    id: str
    time: str
    """UTC, ISO 8601"""
    fatal: bool
    """the engine stopped; otherwise only the requests of the step failed"""
    doing: str
    """what was being done: ``loading DIR``, ``EngineCore busy loop``"""
    what: str
    """the exception in one line"""
    exception: ExceptionRecord
    allocation: dict[str, Any] | None = None
    """the request to the memory resource that failed: api, size, tag, site, #N, error, why, free, live"""
    levers: list[Lever] = []
    requests: list[RequestRecord] = []
    step: StepRecord | None = None
    ledger: dict[str, Any] | None = None
    statistics: dict[str, Any] | None = None
    trace: list[str] = []
    """the memory trace's last lines"""
    config: EngineConfig | None = None
    versions: dict[str, str] = {}
    pid: int = 0
    path: str | None = None
    """where the record was written; None if that failed"""


def allocation_record(request: AllocationRequest) -> dict[str, Any]:
    """A request that failed, for a record: its fields, and what its classification means."""
    cause = CAUSES[request.why]
    return {**request.to_dict(), "cause": cause.meaning, "usually_helps": cause.helps}


def failed_line(request: AllocationRequest, device: str) -> str:
    """The line that a trace prints for `request`."""
    event = TraceEvent(
        EventKind.ALLOC,
        EventState.FAILED,
        request.size,
        sequence=request.sequence or 0,
        tag=request.tag,
        site=request.site,
        requests=request.requests,
        request_count=len(request.requests),
        api=request.api,
        live=request.live or 0,
        free=request.free,
        free_is_read=True,
        error_code=request.error_code,
        why=request.why,
        text=request.error,
    )
    return format_line(event, device)


def read_failure(path: Path) -> FailureRecord:
    """The record in a file. Raises `msgspec.DecodeError` if it is none."""
    return msgspec.json.decode(path.read_bytes(), type=FailureRecord)
