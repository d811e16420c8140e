"""The failure record of an engine that ended without a word: kill -9, a segmentation fault, a hang.

It is composed of what the control plane knows: the exit status, the requests under way, the last figures, and
the flight recorder's file, which outlives its writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.in_flight import InFlight
from engine.errors import EngineLostError
from engine.failure import FailureReporter
from engine.failure_record import FailureRecord, RequestRecord, StepRecord
from engine.memory.errors import TraceFileError
from engine.memory.lines import format_line
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import EventKind, EventState, TraceEvent
from engine.messages import EngineStats

__all__ = ["LastKnown", "kernel_kills", "post_mortem"]

_TRACE_LINES = 200


@dataclass(frozen=True, slots=True)
class LastKnown:
    """What is known of an engine that cannot be asked any more."""

    pid: int
    doing: str
    suspects: Sequence[InFlight]
    """the requests that may have been in its last step"""
    stats: EngineStats | None
    """of its last whole step; None if there was none"""
    ledger: dict[str, Any] | None
    statistics: dict[str, Any] | None
    trace_path: Path | None
    stacks: Sequence[str] = ()
    """of its threads, if it hung"""


def post_mortem(
    reporter: FailureReporter, error: EngineLostError, known: LastKnown, *, verb: str | None
) -> FailureRecord:
    """Compose the record, say it, and write it.

    `verb` is what the busy loop did: ``ended``, ``hangs``; None in a load.
    """
    record = reporter.begin(error, doing=known.doing, fatal=True)
    record.pid = known.pid
    record.exception.traceback = list(known.stacks)
    record.requests = [_request(in_flight, reporter.config.record_prompts) for in_flight in known.suspects]
    if known.stats is not None:
        record.step = StepRecord(
            **{name: getattr(known.stats, name) for name in StepRecord.__struct_fields__}
        )
    record.ledger, record.statistics = known.ledger, known.statistics
    if known.trace_path is not None:
        with suppress(TraceFileError):
            _read_trace(record, known.trace_path)
    reporter.publish(record, verb=verb)
    return record


def _request(in_flight: InFlight, with_prompt: bool) -> RequestRecord:
    request = in_flight.request
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=in_flight.num_tokens,
        params=request.params,
        prompt_token_ids=request.prompt_token_ids if with_prompt else None,
    )


def _read_trace(record: FailureRecord, path: Path) -> None:
    with FlightRecorderReader(path) as reader:
        if reader.header.pid != record.pid:
            return  # it died before it had a trace of its own
        events = list(reader.last(_TRACE_LINES).events())
        record.trace = [format_line(event, reader.header.device) for event in events]
    if events and events[-1].kind is EventKind.ALLOC and events[-1].state is EventState.INTENT:
        record.allocation = _pending(events[-1])


def _pending(event: TraceEvent) -> dict[str, Any]:
    """The request that the engine was in when it ended: asked for, never answered."""
    return {
        "api": event.api,
        "size": event.size,
        "tag": event.tag,
        "site": event.site,
        "sequence": event.sequence,
        "why": None,
        "error": None,
        "requests": list(event.requests),
    }


def kernel_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How often the kernel's out-of-memory killer has struck on this machine; None if it does not tell."""
    with suppress(OSError, ValueError):
        facts: Mapping[str, str] = dict(
            line.split(maxsplit=1) for line in vmstat.read_text().splitlines() if line
        )
        if (count := facts.get("oom_kill")) is not None:
            return int(count)
    return None
