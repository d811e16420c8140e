"""The lines of a trace: formatting, parsing, and printing that never stops the engine. docs/ALLOC_TRACE.md.

::

    [cuda-alloc] #12 size=32.0 MiB live=0.03 GiB free=23.10 GiB tag=weights/model.layers.0.mlp.down_proj
    site=… [cuda-free]  size=2425.0 MiB live=6.74 GiB free=13.81 GiB tag=repack/model.layers.0.mlp.down_proj
    [cuda-alloc] FAILED #717 size=606.0 MiB live=6.74 GiB free=13.81 GiB err=out of memory why=full tag=…
    site=…
"""

from __future__ import annotations

import re
from collections import deque
from threading import Lock
from typing import TextIO

from engine.memory.errors import Why
from engine.memory.record import EventKind, EventState, TraceEvent

__all__ = ["LineWriter", "format_line", "parse_line"]

_MIB = 1 << 20
_GIB = 1 << 30


def format_line(event: TraceEvent, device: str) -> str:
    """The line of `event` on `device` (``host``, ``cuda``), without its end."""
    start = f"[{device}-free] " if event.kind is EventKind.FREE else f"[{device}-alloc]"
    if event.kind in (EventKind.NOTE, EventKind.GAP):
        return f"{start} {event.kind.name} {event.text}"
    size = f"size={event.size / _MIB:.1f} MiB"
    if event.kind is EventKind.BYPASS:
        return f"{start} BYPASS {size} {event.text}"
    if event.state is not EventState.OK:
        start += " PENDING" if event.state is EventState.INTENT else f" {event.state.name}"
    if event.kind is EventKind.ALLOC and event.sequence:  # numbers begin at 1; nothing counts without a trace
        start += f" #{event.sequence}"
    fields = [start, size]
    if event.state in (EventState.OK, EventState.FAILED):
        free = "unknown" if event.free is None else f"{event.free / _GIB:.2f} GiB"
        fields += [f"live={event.live / _GIB:.2f} GiB", f"free={free}"]
    failed = event.state is EventState.FAILED
    if failed:
        error = " ".join(event.text.split())
        fields += [f"err={error}", f"why={event.why.value if event.why else 'unclassified'}"]
    fields.append(f"tag={event.tag}")
    if event.site and (event.kind is EventKind.ALLOC or failed):
        fields.append(f"site={event.site}")
    if event.kind is EventKind.FREE:
        fields.append(f"alloc=#{event.sequence}")
    if event.pool_used is not None and event.pool_reserved is not None:
        fields.append(
            f"api={event.api} pool_used={event.pool_used / _GIB:.2f} GiB"
            f" pool_reserved={event.pool_reserved / _GIB:.2f} GiB"
        )
    if event.retries:
        fields.append(f"retries={event.retries}")
    if event.error_code:
        fields.append(f"code={event.error_code}")
    if event.requests:
        more = event.request_count - len(event.requests)
        fields.append(f"requests={','.join(event.requests)}{f',+{more}' if more > 0 else ''}")
    if event.free is not None and not event.free_is_read:
        fields.append("free_is=estimate")
    return " ".join(fields)


_LINE = re.compile(
    r"\[(?P<device>\w+)-(?P<verb>alloc|free)\] +"
    r"(?:(?P<state>FAILED|PENDING|TORN) +)?(?:#(?P<sequence>\d+) +)?"
    r"size=(?P<size>[\d.]+) MiB"
    r"(?: live=(?P<live>-?[\d.]+) GiB)?(?: free=(?:(?P<free>-?[\d.]+) GiB|unknown))?"
    r"(?P<rest>(?: .*)?)"
)
_FIELD = re.compile(
    r" (err|why|tag|site|alloc|api|pool_used|pool_reserved|retries|code|requests|free_is|planned)="
)
_STATES = {
    None: EventState.OK,
    "FAILED": EventState.FAILED,
    "PENDING": EventState.INTENT,
    "TORN": EventState.TORN,
}


def parse_line(line: str) -> tuple[str, TraceEvent] | None:
    """Device and event of an allocation's or free's line; None for any other line.

    Sizes come back as precisely as they were printed. What follows ``size=`` may be missing or unknown, so
    that lines of other programs in this format parse too. The line may have a prefix (a logger's).
    """
    match = _LINE.search(line)
    if match is None:
        return None
    fields = _fields(match["rest"].rstrip("\r\n"))
    requests = fields.get("requests", "")
    ids = tuple(request for request in requests.split(",") if request and not request.startswith("+"))
    more = re.search(r",\+(\d+)$", requests)
    number = match["sequence"] or fields.get("alloc", "").removeprefix("#")
    try:
        event = TraceEvent(
            kind=EventKind.FREE if match["verb"] == "free" else EventKind.ALLOC,
            state=_STATES[match["state"]],
            size=round(float(match["size"]) * _MIB),
            sequence=int(number) if number.isdigit() else 0,
            tag=fields.get("tag", "other"),
            site=fields.get("site", ""),
            requests=ids,
            request_count=len(ids) + (int(more[1]) if more else 0),
            api=fields.get("api", "host" if match["device"] == "host" else "malloc"),
            live=round(float(match["live"] or 0) * _GIB),
            free=None if match["free"] is None else round(float(match["free"]) * _GIB),
            free_is_read=match["free"] is not None and "free_is" not in fields,
            pool_used=_gibibytes(fields.get("pool_used")),
            pool_reserved=_gibibytes(fields.get("pool_reserved")),
            retries=int(fields.get("retries", 0)),
            error_code=int(fields.get("code", 0)),
            why=next((why for why in Why if why.value == fields.get("why")), None),
            text=fields.get("err", ""),
        )
    except ValueError:
        return None
    return match["device"], event


def _fields(rest: str) -> dict[str, str]:
    pieces = _FIELD.split(rest)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _gibibytes(text: str | None) -> int | None:
    return None if text is None else round(float(text.removesuffix(" GiB")) * _GIB)


class LineWriter:
    """Prints lines to a text stream. A closed pipe or a full disk loses lines; nothing is raised.

    May be called from any thread, and again from a destructor that the garbage collector runs while this
    thread prints: nobody waits, whoever is printing prints the others' lines as well.
    """

    def __init__(self, output: TextIO) -> None:
        self._output: TextIO | None = output
        self._printing = Lock()
        self._waiting: deque[str] = deque(maxlen=4096)
        self.lost = 0
        """Lines that could not be printed."""

    def write(self, line: str) -> None:
        """Print `line`."""
        self._waiting.append(line)
        while self._waiting and self._printing.acquire(blocking=False):
            try:
                self._print_waiting()
            finally:
                self._printing.release()

    def _print_waiting(self) -> None:
        while True:
            try:
                line = self._waiting.popleft()
            except IndexError:
                return
            if self._output is None:
                self.lost += 1
                continue
            try:
                self._output.write(line + "\n")
                self._output.flush()
            except (BrokenPipeError, ValueError):  # the reader is gone, or the stream is closed: for good
                self.lost += 1
                self._output = None
            except (OSError, RuntimeError):  # a full disk may have room later
                self.lost += 1

    def close(self) -> None:
        """Stop printing. The stream belongs to the caller and stays open."""
        self._output = None
