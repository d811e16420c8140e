"""The engine core: takes requests, runs steps, and ends in a failure record when a step throws."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np

from engine.config import EngineLimits
from engine.errors import EngineDeadError, RequestError
from engine.failure import FailureReporter
from engine.failure_record import FailureRecord, RequestRecord, StepRecord
from engine.memory.errors import OutOfMemoryError
from engine.messages import (
    Abort,
    AddRequest,
    EngineFailed,
    EngineMessage,
    EngineStats,
    FinishReason,
    OutputMessage,
    PositionLogprobs,
    RequestUpdate,
    Shutdown,
    StepOutputs,
)
from engine.request import Request, RequestStatus, check_request
from engine.runner import LaunchedStep, ModelRunner, RequestResult
from engine.sampler import TokenLogprobs
from engine.scheduler import ScheduledRequest, Scheduler

__all__ = ["EngineCore", "Inbox", "Outbox"]


class Inbox(Protocol):
    """Where the busy loop takes messages from; a `queue.SimpleQueue` is one."""

    def get(self, block: bool = True) -> EngineMessage:
        """The next message. Raises `queue.Empty` if there is none and `block` is false."""


class Outbox(Protocol):
    """Where the busy loop puts what comes out; a `queue.SimpleQueue` is one."""

    def put(self, message: OutputMessage) -> None:
        """Hand `message` on; may wait, which holds the engine back."""


class _LateOutbox:
    """Keeps what is put in until it is flushed."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._kept: list[OutputMessage] = []

    def put(self, message: OutputMessage) -> None:
        self._kept.append(message)

    def flush(self) -> None:
        kept, self._kept = self._kept, []
        for message in kept:
            self._outbox.put(message)


@dataclass(slots=True, eq=False)
class _Step:
    """A step under way."""

    batch: Sequence[ScheduledRequest]
    launched: LaunchedStep | None = None
    updates: list[RequestUpdate] = field(default_factory=list)
    """of what ran otherwise"""


class EngineCore:
    """Requests in, tokens out, one step at a time. Synchronous, for one thread.

    Everything it uses is handed in; what holds device memory is closed by whoever made it.
    """

    def __init__(
        self,
        limits: EngineLimits,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        eos_token_ids: Iterable[int],
        failures: FailureReporter,
        seed: int | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = scheduler
        self.failure: FailureRecord | None = None
        """why the engine stopped, if it did"""
        self._runner: ModelRunner | None = runner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._failures = failures
        self._seed = secrets.randbits(64) if seed is None else seed
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._step = 0
        self._in_flight: _Step | None = None

    # -- requests ------------------------------------------------------------------------------------------

    def add_request(self, message: AddRequest) -> None:
        """Queue a request.

        Raises
        ------
        RequestError
            It cannot be served as asked, or its id is taken.
        EngineDeadError
            The engine stopped.
        """
        self._check_alive()
        if message.request_id in self._requests:
            raise RequestError(f"request_id: {message.request_id!r} is in use", field="request_id")
        check_request(message, self.limits)
        self._arrivals += 1
        request = Request.create(
            message, self.limits, self._eos_token_ids, arrival=self._arrivals, key=self._key(message)
        )
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; their blocks are free at once. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)

    def close(self) -> None:
        """Forget all requests and let go of the model; nothing can be asked any more. Idempotent."""
        self.abort(list(self._requests))
        self._runner = self._in_flight = None

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def _key(self, message: AddRequest) -> int:
        """64 bits for the request's random numbers: its seed, or what the engine's seed and its turn give."""
        if message.params.seed is not None:
            return message.params.seed % 2**64
        return int(np.random.SeedSequence([self._seed, self._arrivals]).generate_state(1, np.uint64)[0])

    def _finish(self, request: Request, *, valid_tokens: int | None = None) -> None:
        self.scheduler.finish(request, valid_tokens=valid_tokens)
        del self._requests[request.request_id]

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def runs_ahead(self) -> bool:
        """Between `launch` and `collect` the device works, and the host has time for something else."""
        return self._runner is not None and self._runner.runs_ahead

    def step(self) -> StepOutputs:
        """Run one step and tell what it did. Without requests it does nothing.

        Raises
        ------
        EngineDeadError
            The step threw. The failure is recorded (`failure`), and the engine takes no more requests.
        """
        self.launch()
        return self.collect()

    def launch(self) -> None:
        """Begin a step; `collect` it before the next. Requests may be added and aborted in between.

        Raises as `step` does.
        """
        runner = self._check_alive()
        self.settle()
        self._step += 1
        batch: list[ScheduledRequest] = []
        try:
            batch = self.scheduler.schedule()
            self._in_flight = _Step(batch)
            if batch:
                try:
                    self._in_flight.launched = runner.launch(batch)
                except OutOfMemoryError as error:
                    self._in_flight.updates = self._run_one_by_one(runner, batch, error)
        except BaseException as error:
            self._end(error, batch)

    def collect(self) -> StepOutputs:
        """What the launched step did. An empty step if none was launched. Raises as `step` does."""
        runner = self._check_alive()
        step, self._in_flight = self._in_flight or _Step([]), None
        try:
            if step.launched is not None:
                try:
                    step.updates = self._updates(runner.collect(step.launched))
                except OutOfMemoryError as error:
                    step.updates = self._run_one_by_one(runner, step.batch, error)
        except BaseException as error:
            self._end(error, step.batch)
        return StepOutputs(step.updates, self._stats(step.batch))

    def settle(self) -> None:
        """Wait for a step that was launched and never collected, and forget what it did.

        Its sequences that are not aborted are computed again. Raises as `step` does.
        """
        step, self._in_flight = self._in_flight, None
        if step is None or step.launched is None or self._runner is None or self.failure is not None:
            return
        try:
            self._runner.collect(step.launched)
        except BaseException as error:
            self._end(error, step.batch)
        for item in step.batch:
            self.scheduler.roll_back(item)

    def _end(self, error: BaseException, batch: Sequence[ScheduledRequest]) -> NoReturn:
        """A step threw."""
        self._in_flight = None
        if isinstance(error, Exception):
            self.failure = self._record(error, batch, fatal=True)
            raise self._failures.dead(self.failure) from error
        # Interrupted: the engine stays usable.
        for item in batch:
            self.scheduler.roll_back(item)
        raise error

    def run_busy_loop(self, inbox: Inbox, outbox: Outbox) -> None:
        """Serve until a `Shutdown` arrives: waits while there is nothing to do.

        Where a launched step runs by itself, what the last one did is put out meanwhile.

        Raises
        ------
        EngineDeadError
            A step threw; `EngineFailed` was put out before.
        """
        late = _LateOutbox(outbox)
        try:
            while self._take_messages(inbox, late):
                self.launch()
                late.flush()
                outputs = self.collect()
                # A step that only computed a part of a prompt is told too: somebody may watch for progress.
                if outputs.updates or outputs.stats.prefill_tokens or outputs.stats.decode_tokens:
                    late.put(outputs)
                if not self.runs_ahead:
                    late.flush()
            late.flush()
        except EngineDeadError:
            late.flush()
            if self.failure is not None:
                outbox.put(EngineFailed(self.failure.what, self.failure.id))
            raise

    def _take_messages(self, inbox: Inbox, outbox: _LateOutbox) -> bool:
        """Handle what has arrived, waiting if there is no request to work on. False to stop."""
        while True:
            if not self._requests:
                outbox.flush()
            try:
                message = inbox.get(block=not self._requests)
            except queue.Empty:
                return True
            match message:
                case AddRequest():
                    try:
                        self.add_request(message)
                    except RequestError as error:
                        update = _failed_update(message.request_id, str(error))
                        outbox.put(StepOutputs([update], self._stats([])))
                case Abort():
                    self.abort(message.request_ids)
                case Shutdown():
                    return False

    def _run_one_by_one(
        self, runner: ModelRunner, batch: Sequence[ScheduledRequest], cause: OutOfMemoryError
    ) -> list[RequestUpdate]:
        """The batch did not fit: run its sequences alone, and fail those that cannot fit even so.

        If none of several fits, no single request is to blame.
        """
        updates: list[RequestUpdate] = []
        failed: list[tuple[ScheduledRequest, OutOfMemoryError]] = []
        spoilt: set[int] = set()
        """blocks that were to be written by a sequence that failed"""
        for item in batch:
            if spoilt.intersection(item.request.blocks.tolist()):
                self.scheduler.roll_back(item)
                continue
            if len(batch) == 1:
                error: OutOfMemoryError | None = cause
            else:
                try:
                    updates += self._updates(runner.collect(runner.launch([item])))
                    error = None
                except OutOfMemoryError as alone:
                    error = alone
            if error is not None:
                failed.append((item, error))
                spoilt.update(item.request.blocks[item.start // self.limits.block_size :].tolist())
        if len(failed) == len(batch) > 1:
            raise cause
        for item, error in failed:
            record = self._record(error, [item], fatal=False)
            text = f"does not fit in memory: {error}"
            updates.append(self._fail(item, text, failure_id=record.id))
        return updates

    def _updates(self, results: Iterable[RequestResult]) -> list[RequestUpdate]:
        updates = (self._update(result) for result in results)
        return [update for update in updates if update is not None]

    def _update(self, result: RequestResult) -> RequestUpdate | None:
        """Take a sequence's result over into the request; None if there is nothing to tell yet."""
        item, request = result.scheduled, result.scheduled.request
        if request.status is RequestStatus.FINISHED:  # aborted while the step was computed
            return None
        if result.unusable:
            text = f"logits after token {item.end} are not numbers: the model's weights or cache are damaged"
            return self._fail(item, text)
        request.num_prompt_logprobs += len(result.prompt_logprobs)
        if result.token_id is None and not result.prompt_logprobs:
            return None
        update = RequestUpdate(request_id=request.request_id, num_cached_tokens=request.num_cached_tokens)
        if result.prompt_logprobs:
            update.prompt_logprobs = [_position(logprobs) for logprobs in result.prompt_logprobs]
        if result.token_id is not None:
            update.new_token_ids = [result.token_id]
            if result.logprobs is not None:
                update.logprobs = [_position(result.logprobs)]
            update.finish_reason = request.append(result.token_id)
            if update.finish_reason is FinishReason.STOP and result.token_id in request.params.stop_token_ids:
                update.stop_token_id = result.token_id
            if update.finish_reason is not None:
                self._finish(request)
        return update

    # -- failures and figures ------------------------------------------------------------------------------

    def _check_alive(self) -> ModelRunner:
        if self.failure is not None:
            raise self._failures.dead(self.failure)
        if self._runner is None:
            raise EngineDeadError("the engine is closed")
        return self._runner

    def _fail(self, item: ScheduledRequest, text: str, *, failure_id: str | None = None) -> RequestUpdate:
        """End one request with an error; nothing of its sequence stays in the prefix cache."""
        self._finish(item.request, valid_tokens=0)
        request_id = item.request.request_id
        return _failed_update(request_id, f"request {request_id}: {text}", failure_id)

    def _record(
        self, error: BaseException, batch: Sequence[ScheduledRequest], *, fatal: bool
    ) -> FailureRecord:
        stats = self._stats(batch)
        fields = {name: getattr(stats, name) for name in StepRecord.__struct_fields__}
        return self._failures.report(
            error,
            doing="EngineCore busy loop",
            fatal=fatal,
            step=StepRecord(**fields),
            requests=[self._request_record(item) for item in batch],
        )

    def _request_record(self, item: ScheduledRequest) -> RequestRecord:
        request = item.request
        record_prompt = self._failures.config.record_prompts
        return RequestRecord(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            computed_tokens=item.start,
            blocks=request.num_blocks,
            params=request.params,
            prompt_token_ids=request.prompt_token_ids.tolist() if record_prompt else None,
        )

    def _stats(self, batch: Sequence[ScheduledRequest]) -> EngineStats:
        scheduler, kv = self.scheduler, self.scheduler.kv
        prefill = sum(item.num_tokens for item in batch if item.is_prefill)
        return EngineStats(
            step=self._step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=kv.pool.num_blocks,
            num_used_blocks=kv.pool.num_held,
            prefill_tokens=prefill,
            decode_tokens=sum(item.num_tokens for item in batch) - prefill,
            preemptions=scheduler.preemptions,
            prefix_queries=kv.prefix_queries,
            prefix_hits=kv.prefix_hits,
        )


def _failed_update(request_id: str, text: str, failure_id: str | None = None) -> RequestUpdate:
    return RequestUpdate(
        request_id=request_id, finish_reason=FinishReason.ERROR, error=text, failure_id=failure_id
    )


def _position(logprobs: TokenLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids.tolist(),
        top_logprobs=logprobs.top_logprobs.tolist(),
    )
