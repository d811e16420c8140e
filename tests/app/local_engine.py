"""A whole engine in the test's own process, stepped by whoever waits for it, that fails when told to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel

from app.serving_engine import EngineState
from engine.compose import Engine
from engine.config import EngineLimits
from engine.messages import AddRequest, EngineStats, FinishReason
from engine.model.tokenizer import Tokenizer
from engine.output_processor import OutputProcessor
from engine.outputs import CompletionDelta


class LocalEngine:
    """A `ServingEngine` over an `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.state = EngineState.READY
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.limits: EngineLimits | None = engine.limits
        self.stats: EngineStats | None = None
        self.restarts = 0
        self.last_failure_id: str | None = None
        self.failures: dict[str, int] = {}
        self.refusal: Exception | None = None
        """raised by the next requests"""
        self.script: list[CompletionDelta] | None = None
        """what the next requests get, whatever they ask"""
        self.requests: list[AddRequest] = []
        self.core_is_slow = False
        """each step takes 20 ms more"""
        self._processor = OutputProcessor(engine.tokenizer)
        self._arrived: dict[str, deque[CompletionDelta]] = {}

    @property
    def used_blocks(self) -> int:
        return self.inner.core.scheduler.kv.pool.num_held

    @property
    def unfinished(self) -> bool:
        return self.inner.core.has_unfinished_requests

    def ledger(self) -> Mapping[str, Any] | None:
        return self.inner.house.ledger("now").to_dict()

    def alloc_failures(self) -> Mapping[str, int]:
        return self.failures

    async def drain(self, seconds: float) -> None:
        """Wait for requests to end; those that do not end with an error."""
        with anyio.move_on_after(seconds):
            while self._arrived:
                await anyio.sleep(0.01)
        for request_id, arrived in self._arrived.items():
            self.inner.core.abort(self._processor.forget(request_id))
            reason, error = FinishReason.ABORT, "the server is stopping"
            arrived.append(CompletionDelta(request_id, 0, "", [], finish_reason=reason, error=error))

    async def generate(self, request: AddRequest, text: str | None) -> AsyncGenerator[CompletionDelta, None]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.script is not None:
            for delta in self.script:
                yield delta
            return
        core = self.inner.core
        arrived = self._arrived[request.request_id] = deque()
        unfinished = request.params.n
        try:
            for message in self._processor.add(request):
                core.add_request(message)
            while unfinished:
                while not arrived:
                    await anyio.lowlevel.checkpoint()
                    self._step()
                delta = arrived.popleft()
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            del self._arrived[request.request_id]
            core.abort(self._processor.forget(request.request_id))

    def _step(self) -> None:
        if self.core_is_slow:
            time.sleep(0.02)
        outputs = self.inner.core.step()
        self.stats = outputs.stats
        processed = self._processor.process(outputs.updates)
        self.inner.core.abort(processed.to_abort)
        for delta in processed.deltas:
            with suppress(KeyError):
                self._arrived[delta.request_id].append(delta)
