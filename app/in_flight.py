"""Requests under way: what has come of each and is not read yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import anyio

from engine.messages import AddRequest, FinishReason
from engine.outputs import CompletionDelta

__all__ = ["InFlight"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One request of a client's, with its `n` completions."""

    request: AddRequest
    core_requests: list[AddRequest] = field(default_factory=list)
    """what the engine was asked; one for each completion"""
    num_tokens: int = 0
    """generated so far"""
    has_output: bool = False
    """a piece has come; it could not be taken back"""
    failing_steps: int = 0
    """how many steps it was in that ended an engine"""
    _waiting: deque[CompletionDelta] = field(default_factory=deque)
    _unfinished: set[int] = field(default_factory=set)
    _arrived: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self._unfinished = set(range(self.request.params.n))

    @property
    def finished(self) -> bool:
        """Everything has come, read or not."""
        return not self._unfinished

    def put(self, delta: CompletionDelta) -> None:
        """Add what became known. Who reads slowly finds it in fewer and larger pieces."""
        self.has_output = True
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last.index == delta.index:
            _append(last, delta)
        else:
            self._waiting.append(delta)
        self._arrived.set()

    def fail(self, text: str, failure_id: str | None, reason: FinishReason = FinishReason.ERROR) -> None:
        """End every completion that has not ended."""
        for index in sorted(self._unfinished):
            self.put(
                CompletionDelta(
                    self.request.request_id,
                    index,
                    "",
                    [],
                    finish_reason=reason,
                    error=text,
                    failure_id=failure_id,
                )
            )

    async def get(self) -> CompletionDelta | None:
        """The next piece; None after the last."""
        while not self._waiting:
            if self.finished:
                return None
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._waiting.popleft()


def _append(delta: CompletionDelta, more: CompletionDelta) -> None:
    """Make one piece of two that follow each other in a completion."""
    delta.text += more.text
    delta.token_ids = [*delta.token_ids, *more.token_ids]
    if more.logprobs is not None:
        delta.logprobs = [*(delta.logprobs or ()), *more.logprobs]
    if more.prompt_logprobs is not None:
        delta.prompt_logprobs = [*(delta.prompt_logprobs or ()), *more.prompt_logprobs]
    delta.num_cached_tokens = more.num_cached_tokens
    delta.finish_reason = more.finish_reason
    delta.stop_reason = more.stop_reason
    delta.error = more.error
    delta.failure_id = more.failure_id
