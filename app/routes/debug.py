"""``/debug/alloc``: the memory trace, the ledger, the counts, and the failure records.

Everything is read from the flight recorder's file and from what the engine has told: asking costs the engine
nothing, and works while it is dead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Protocol

import anyio.to_thread
from fastapi import APIRouter, Header, Query
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from app.failure_store import FailureStore
from app.http_errors import ApiError, JsonResponse, public_text
from app.settings import parse_byte_size
from app.trace.exporters import EXPORTERS
from app.trace_filter import KINDS, TraceFilter, event_json
from app.trace_stream import Piece, Position, TracePath, TraceStream, read_recent
from engine.memory.errors import ConfigurationError, TraceFileError
from engine.memory.ledger import Ledger
from engine.memory.lines import format_line
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import EventKind, EventState, TraceEvent

__all__ = ["DebugSource", "debug_router"]

_KEEP_ALIVE_SECONDS = 15.0
_MOST_LAST = 1 << 24
_NEW_ENGINE = "the trace of an engine that was started meanwhile begins here"

TEXT = "text/plain; charset=utf-8"
EVENTS = "text/event-stream"
NDJSON = "application/x-ndjson"
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/plain": {"schema": {"type": "string"}},
            EVENTS: {"schema": {"type": "string"}},
            NDJSON: {"schema": {"type": "string"}},
        }
    }
}


class DebugSource(TracePath, Protocol):
    """What is known of the engine's memory, whether it lives or not."""

    @property
    def failures(self) -> FailureStore:
        """All records of this server."""

    def ledger(self) -> Mapping[str, Any] | None:
        """The latest known, as `Ledger.to_dict` has it."""

    def statistics(self) -> Mapping[str, Any] | None:
        """The latest known, as `MemoryStatistics.to_dict` has them."""


def debug_router(source: DebugSource) -> APIRouter:
    """The routes, over `source`."""
    router = APIRouter(prefix="/debug/alloc", tags=["Memory"])
    stream = TraceStream(source)

    @router.get("", responses=_CONTENT, response_class=Response)
    async def trace(
        last: Annotated[int, Query(ge=0, le=_MOST_LAST)] = 200,
        min_size: str | None = None,
        tag: str = "",
        kind: Annotated[list[str] | None, Query()] = None,
        follow: bool = False,
        accept: Annotated[str, Header()] = "",
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """The most recent lines; ``follow`` streams on. Text, server-sent events or NDJSON, by ``Accept``."""
        path = _trace_path(source)
        chosen = TraceFilter(_byte_size(min_size), tag, _kinds(kind))
        media_type = _media_type(accept)
        if follow or media_type == EVENTS:
            start = None if last_event_id is None else Position.parse(last_event_id) or Position(0, 0)
            write = _WRITERS[media_type]
            pieces = _follow(stream, start, last, chosen, write, keep_alive=media_type == EVENTS)
            return StreamingResponse(pieces, media_type=media_type, headers=_NO_STORE)
        count = last if chosen.passes_all else None
        try:
            piece = await anyio.to_thread.run_sync(read_recent, path, count)
        except TraceFileError:  # the engine has not come so far
            return Response(b"", media_type=media_type, headers=_NO_STORE)
        found = [event for event in piece.events if chosen.passes(event)][-last or len(piece.events) :]
        body = b"".join(_WRITERS[media_type](event, piece) for event in found)
        return Response(body, media_type=media_type, headers=_NO_STORE)

    @router.get("/ledger", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def ledger(accept: Annotated[str, Header()] = "") -> Response:
        """Where the device's bytes are: by tag, and what no tag has. It adds up to the device.

        A table for a person where ``Accept`` has ``text/plain``, else JSON.
        """
        known = source.ledger()
        if known is None:
            raise ApiError(404, "there is no ledger yet: the engine is loading", code="not_yet")
        if "text/plain" in accept:
            return Response(f"{Ledger.from_dict(known).render()}\n", media_type=TEXT, headers=_NO_STORE)
        return JsonResponse(known, headers=_NO_STORE)

    @router.get("/stats")
    async def stats() -> Response:
        """Requests, frees, failures, bytes and peaks, by tag."""
        known = source.statistics()
        if known is None:
            raise ApiError(
                404,
                "there are no counts: the engine is loading, or counts are off (--no-alloc-stats)",
                code="not_yet",
            )
        return JsonResponse(known, headers=_NO_STORE)

    @router.get("/failures")
    async def failures() -> Response:
        """What each failure record is about, newest first."""
        return JsonResponse({"failures": source.failures.list()}, headers=_NO_STORE)

    @router.get("/failures/{failure_id}", responses={200: {"content": {"application/json": {}}}})
    async def failure(failure_id: str) -> Response:
        """A whole failure record."""
        record = source.failures.get(failure_id)
        if record is None:
            raise ApiError(404, f"failure_id: there is no record {public_text(failure_id)[:100]!r}")
        return Response(record, media_type="application/json", headers=_NO_STORE)

    @router.get("/export", responses={200: {"content": {NDJSON: {}}}}, response_class=Response)
    async def export(format: str = "ndjson") -> Response:
        """The whole trace that is held, in a form that other tools read."""
        path = _trace_path(source)
        exporter = EXPORTERS.get(format)
        if exporter is None:
            expected = ", ".join(EXPORTERS)
            message = f"format: {public_text(format)[:100]!r}: expected one of {expected}"
            raise ApiError(400, message, param="format")
        try:
            reader = await anyio.to_thread.run_sync(FlightRecorderReader, path)
        except TraceFileError:
            raise ApiError(404, "there is no trace yet: the engine is loading", code="not_yet") from None
        try:
            pieces = exporter.encode(_all_events(reader), reader.header)
        except ConfigurationError as error:
            reader.close()
            raise ApiError(501, public_text(str(error)), param="format") from None
        name = f"alloc-trace{exporter.suffix}"
        headers = {**_NO_STORE, "Content-Disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(
            iterate_in_threadpool(pieces), media_type=exporter.media_type, headers=headers
        )

    return router


_NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _all_events(reader: FlightRecorderReader) -> Iterator[TraceEvent]:
    with reader:
        for piece in reader.chunks():
            yield from piece.events()


# -- following ---------------------------------------------------------------------------------------------


async def _follow(
    stream: TraceStream,
    start: Position | None,
    last: int,
    chosen: TraceFilter,
    write: Callable[[TraceEvent, Piece], bytes],
    *,
    keep_alive: bool,
) -> AsyncIterator[bytes]:
    yield b": the memory trace\n\n" if keep_alive else b""
    async with aclosing(stream.follow(start, last, keep_alive=_KEEP_ALIVE_SECONDS)) as pieces:
        async for piece in pieces:
            if piece is None:
                if keep_alive:
                    yield b": \n\n"
                continue
            parts = [_begins(piece, write)] if piece.begins else []
            parts += [write(event, piece) for event in piece.events if chosen.passes(event)]
            if parts:
                yield b"".join(parts)


def _begins(piece: Piece, write: Callable[[TraceEvent, Piece], bytes]) -> bytes:
    note = TraceEvent(kind=EventKind.NOTE, state=EventState.OK, size=0, text=_NEW_ENGINE)
    if write is not _as_sse:
        return write(note, piece)
    start = f"event: engine\nid: {Position(piece.created, 0)}\ndata: "
    return start.encode() + event_json(note) + b"\n\n"


# -- forms -------------------------------------------------------------------------------------------------


def _as_text(event: TraceEvent, piece: Piece) -> bytes:
    return format_line(event, piece.device).encode() + b"\n"


def _as_ndjson(event: TraceEvent, piece: Piece) -> bytes:
    return event_json(event) + b"\n"


def _as_sse(event: TraceEvent, piece: Piece) -> bytes:
    name = b"event: gap\n" if event.kind is EventKind.GAP else b""
    return name + f"id: {piece.position(event)}\n".encode() + b"data: " + event_json(event) + b"\n\n"


_WRITERS: Mapping[str, Callable[[TraceEvent, Piece], bytes]] = {
    TEXT: _as_text,
    NDJSON: _as_ndjson,
    EVENTS: _as_sse,
}


def _media_type(accept: str) -> str:
    """The form that a client asked for; text if it does not say."""
    for entry in accept.split(","):
        name = entry.partition(";")[0].strip().lower()
        if name in (EVENTS, NDJSON):
            return name
        if name in ("text/plain", "text/*", "*/*"):
            break
    return TEXT


# -- parameters --------------------------------------------------------------------------------------------


def _trace_path(source: DebugSource) -> Path:
    if source.trace_path is None:
        raise ApiError(
            404,
            "tracing is off: start the server with VT_CUDA_ALLOC_TRACE=1 or --alloc-trace",
            code="tracing_off",
        )
    return source.trace_path


def _byte_size(text: str | None) -> int:
    if text is None or text == "0":
        return 0
    try:
        return parse_byte_size(text)
    except ValueError as error:
        raise ApiError(400, f"min_size: {public_text(str(error))}", param="min_size") from None


def _kinds(given: list[str] | None) -> frozenset[str]:
    names = [name.strip() for entry in given or () for name in entry.split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            message = f"kind: {public_text(name)[:100]!r}: expected one of {', '.join(KINDS)}"
            raise ApiError(400, message, param="kind")
    return frozenset(names)
