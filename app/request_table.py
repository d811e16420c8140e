"""All requests under way, and what becomes of them when an engine dies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import anyio

from app.in_flight import InFlight
from app.serving_engine import QueueFullError
from engine.errors import RequestError
from engine.messages import AddRequest, FinishReason, RequestUpdate
from engine.output_processor import Detokenizer, OutputProcessor

__all__ = ["RequestTable"]

_MOST_FAILING_STEPS = 2


class RequestTable:
    """Requests by id, in the order in which they came.

    Parameters
    ----------
    max_queued
        Most sequences that may wait beyond those that the engine runs at once.
    """

    def __init__(self, tokenizer: Detokenizer, *, max_queued: int) -> None:
        self._processor = OutputProcessor(tokenizer)
        self._max_queued = max_queued
        self._requests: dict[str, InFlight] = {}
        self._by_core_id: dict[str, InFlight] = {}
        self._emptied = anyio.Event()

    @property
    def is_busy(self) -> bool:
        """The engine owes something."""
        return bool(self._by_core_id)

    def open(self, request: AddRequest, *, max_num_seqs: int) -> InFlight:
        """Take a request in; its `core_requests` are for the engine.

        Raises
        ------
        QueueFullError
            As many wait as may.
        RequestError
            Its id is taken.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id: {request.request_id!r} is in use", field="request_id")
        waiting = len(self._by_core_id) + request.params.n - max_num_seqs
        if self._by_core_id and waiting > self._max_queued:
            raise QueueFullError(
                f"{len(self._by_core_id)} sequences are under way: "
                f"expected at most {max_num_seqs + self._max_queued} with these {request.params.n} "
                f"(--max-queued-requests {self._max_queued})"
            )
        in_flight = InFlight(request)
        in_flight.core_requests = self._processor.add(request)
        self._requests[request.request_id] = in_flight
        for core in in_flight.core_requests:
            self._by_core_id[core.request_id] = in_flight
        return in_flight

    def close(self, in_flight: InFlight) -> list[str]:
        """Forget a request. Returns the core requests that the engine still works on."""
        del self._requests[in_flight.request.request_id]
        self._processor.forget(in_flight.request.request_id)
        unfinished = [core.request_id for core in in_flight.core_requests if self._drop(core.request_id)]
        if not self._requests:
            self._emptied.set()
        return unfinished

    def process(self, updates: Iterable[RequestUpdate]) -> list[str]:
        """Hand on what the engine did. Returns core requests that it need not go on with."""
        updates = list(updates)
        processed = self._processor.process(updates)
        for delta in processed.deltas:
            self._requests[delta.request_id].put(delta)
        for update in updates:
            if update.finish_reason is not None:
                self._drop(update.request_id)
        return [core_id for core_id in processed.to_abort if self._drop(core_id)]

    async def wait_empty(self) -> None:
        """Return when no request is under way."""
        while self._requests:
            self._emptied = anyio.Event()
            await self._emptied.wait()

    # -- when an engine dies -------------------------------------------------------------------------------

    def of_core_ids(self, core_ids: Iterable[str]) -> list[InFlight]:
        """The requests that these core requests belong to, each once."""
        found = (self._by_core_id.get(core_id) for core_id in core_ids)
        return list(dict.fromkeys(in_flight for in_flight in found if in_flight is not None))

    def suspects(self, max_num_seqs: int, *, by_priority: bool) -> list[InFlight]:
        """Those that may have been in the last step: the first in the scheduler's order."""
        waiting = list(self._by_core_id.values())
        if by_priority:
            waiting.sort(key=lambda in_flight: in_flight.request.priority)
        return list(dict.fromkeys(waiting[:max_num_seqs]))

    def engine_died(self, in_step: Collection[InFlight], failure_id: str) -> None:
        """End what has had output, and what was in its second failing step. The rest waits to run again."""
        for in_flight in self._unfinished():
            request_id = in_flight.request.request_id
            if in_flight in in_step:
                in_flight.failing_steps += 1
            if in_flight.failing_steps >= _MOST_FAILING_STEPS:
                self._fail(
                    in_flight,
                    f"request {request_id} was in the step of {in_flight.failing_steps} failures "
                    "and is not run again",
                    failure_id,
                )
            elif in_flight.has_output:
                self._fail(in_flight, "the engine stopped", failure_id)

    def fail_all(self, text: str, failure_id: str | None, reason: FinishReason) -> list[str]:
        """End everything. Returns the core requests that were not finished."""
        core_ids = list(self._by_core_id)
        for in_flight in self._unfinished():
            self._fail(in_flight, text, failure_id, reason)
        return core_ids

    def to_run(self) -> Sequence[AddRequest]:
        """What a new engine is to do."""
        return [
            core
            for in_flight in self._unfinished()
            for core in in_flight.core_requests
            if core.request_id in self._by_core_id
        ]

    def _unfinished(self) -> list[InFlight]:
        return [in_flight for in_flight in self._requests.values() if not in_flight.finished]

    def _fail(
        self,
        in_flight: InFlight,
        text: str,
        failure_id: str | None,
        reason: FinishReason = FinishReason.ERROR,
    ) -> None:
        self._processor.forget(in_flight.request.request_id)
        for core in in_flight.core_requests:
            self._drop(core.request_id)
        in_flight.fail(text, failure_id, reason)

    def _drop(self, core_id: str) -> bool:
        return self._by_core_id.pop(core_id, None) is not None
