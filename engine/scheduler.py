"""Which tokens of which sequences the next step computes.

There are no prefill and decode phases: every sequence has tokens that are known and tokens that are computed,
and a step computes some of the difference for as many sequences as the token budget allows. A long prompt is
computed in chunks, beside the sequences that only have their last token to compute. When blocks run out, the
last sequence in the order is preempted: it gives up all its blocks and is computed again later, as a longer
prompt.

The order is by arrival, or by priority and then arrival. Nothing here allocates device memory.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engine.config import EngineLimits, SchedulingPolicy
from engine.kv_cache import KVCacheManager
from engine.request import Request, RequestStatus

__all__ = ["ScheduledRequest", "Scheduler"]


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Tokens ``start : start + num_tokens`` of a sequence, to be computed in one step."""

    request: Request
    start: int
    num_tokens: int
    logits_start: int
    """from this position to the end, every token's logits are wanted"""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """The last known token is among them, so the step chooses the next."""
        return self.end == self.request.num_tokens

    @property
    def is_prefill(self) -> bool:
        return self.start < self.request.num_prompt_tokens


class Scheduler:
    """Holds the requests and makes one step's batch after the other."""

    def __init__(self, limits: EngineLimits, kv: KVCacheManager, policy: SchedulingPolicy = "fcfs") -> None:
        self.limits = limits
        self.kv = kv
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """both sorted, first served first"""
        self.preemptions = 0
        self._by_priority = policy == "priority"

    def order(self, request: Request) -> tuple[int, int]:
        """Sequences with a smaller key are served first and preempted last."""
        return (request.priority if self._by_priority else 0, request.arrival)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        insort(self.waiting, request, key=self.order)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step's batch; empty only if there are no requests.

        Its tokens count as computed from now on: `roll_back` what was then not computed after all.
        """
        batch: list[ScheduledRequest] = []
        budget = _StepBudget(self.limits)
        preempted = self.preemptions
        # The last in the order is preempted first: it was not scheduled yet, or it is being scheduled.
        while len(batch) < len(self.running) and budget.tokens:
            request = self.running[len(batch)]
            if self._grow(request):
                batch.append(self._take(request, budget))
        # Blocks that preemption freed belong to those that run.
        while self.waiting and budget.tokens and self.preemptions == preempted:
            if len(self.running) == self.limits.max_num_seqs:
                break
            request = self.waiting[0]
            if not self.kv.admit(request, headroom=len(self.running)):
                break
            self._start(request)
            batch.append(self._take(request, budget))
        return batch

    def finish(self, request: Request, *, valid_tokens: int | None = None) -> None:
        """Let go of a request, wherever it is, and of its blocks.

        After a step that failed, `valid_tokens` says how many of its tokens are sure to be in the cache.
        """
        if request.status is not RequestStatus.FINISHED:
            (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
            self.kv.release(request, valid_tokens=valid_tokens)
            request.status = RequestStatus.FINISHED

    def roll_back(self, scheduled: ScheduledRequest) -> None:
        """The step was not computed: the sequence waits to be computed again from the beginning."""
        request = scheduled.request
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._wait(request, valid_tokens=scheduled.start)

    def _take(self, request: Request, budget: _StepBudget) -> ScheduledRequest:
        """Schedule as many of the sequence's tokens as the budget allows, at least one."""
        start = request.num_computed_tokens
        row_each = request.lacks_prompt_logprobs
        count = budget.take(request.num_tokens - start, row_each=row_each)
        request.num_computed_tokens = start + count
        # Sequences of the same step find these blocks already: a layer stores all K and V before it attends.
        self.kv.register(request)
        if row_each:
            logits_start = max(start, request.num_prompt_logprobs)
        else:
            logits_start = min(request.num_tokens - 1, start + count)
        return ScheduledRequest(request, start, count, logits_start)

    def _grow(self, request: Request) -> bool:
        while not self.kv.grow(request):
            victim = self.running.pop()
            self._wait(victim)
            self.preemptions += 1
            if victim is request:
                return False
        return True

    def _start(self, request: Request) -> None:
        self.waiting.pop(0)
        if request.num_output_tokens == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=self.order)

    def _wait(self, request: Request, *, valid_tokens: int | None = None) -> None:
        self.kv.release(request, valid_tokens=valid_tokens)
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=self.order)


class _StepBudget:
    """Tokens that a step has left, and rows of logits beyond one for each sequence."""

    def __init__(self, limits: EngineLimits) -> None:
        self.tokens = limits.max_num_batched_tokens
        self.spare_rows = limits.max_logits_rows - limits.max_num_seqs

    def take(self, wanted: int, *, row_each: bool) -> int:
        """Up to `wanted` tokens; with `row_each` no more than there are rows for."""
        count = min(wanted, self.tokens)
        if row_each:
            count = min(count, 1 + self.spare_rows)
            self.spare_rows -= count - 1
        self.tokens -= count
        return count
