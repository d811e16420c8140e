"""One HTTP request for text: its prompts, run in the engine together."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from app.http_errors import ApiError, public_text, unavailable
from app.metrics import ServerMetrics
from app.serving_engine import ServingEngine
from engine.messages import AddRequest, FinishReason
from engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from engine.request import check_request
from engine.sampling_params import SamplingParams

__all__ = ["Generation", "Prompt", "off_the_loop"]

_INLINE = 2048
"""characters that are cut into tokens sooner than a thread is called"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to go on from."""

    text: str | None
    """None if it was given as token ids"""
    token_ids: list[int]


async def off_the_loop(size: int, work: Callable[[], T]) -> T:
    """The outcome of `work`, which looks at `size` characters: in a thread where that takes a while."""
    return work() if size <= _INLINE else await anyio.to_thread.run_sync(work)


class Generation:
    """Prompts that are answered together. Deltas carry the prompt's number before them.

    Raises
    ------
    RequestError
        A prompt or parameter cannot be served.
    ApiError
        503: the engine was never ready.
    """

    def __init__(
        self,
        engine: ServingEngine,
        metrics: ServerMetrics,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        prefix: str,
        priority: int = 0,
    ) -> None:
        self.id = prefix + secrets.token_hex(16)
        self.created = int(time.time())
        self.prompts = prompts
        self.params = params
        self._engine = engine
        self._metrics = metrics
        self._requests = [
            AddRequest(
                request_id=self.id if len(prompts) == 1 else f"{self.id}-{number}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                priority=priority,
            )
            for number, prompt in enumerate(prompts)
        ]
        limits = engine.limits
        if limits is None:
            raise unavailable("the engine is starting")
        for request in self._requests:
            check_request(request, limits)
        self.outputs = [
            RequestOutput(
                request.request_id,
                prompt=prompt.text,
                prompt_token_ids=prompt.token_ids,
                outputs=[CompletionOutput(index) for index in range(params.n)],
                prompt_logprobs=None if params.prompt_logprobs is None else [None],
            )
            for request, prompt in zip(self._requests, prompts, strict=True)
        ]
        """what has come so far"""

    async def collect(self) -> list[RequestOutput]:
        """Everything, when it is complete."""
        async with self.deltas() as deltas:
            async for _ in deltas:
                pass
        return self.outputs

    @asynccontextmanager
    async def deltas(self) -> AsyncGenerator[AsyncIterator[tuple[int, CompletionDelta]], None]:
        """Pieces as they come. Leaving early aborts what is not finished.

        The iterator raises ApiError when a completion fails: 503 with the failure record if there is one.
        """
        if len(self.prompts) == 1:
            async with aclosing(self._of_prompt(0)) as deltas:
                yield deltas
            return
        send, receive = anyio.create_memory_object_stream[tuple[int, CompletionDelta] | Exception](0)
        async with receive, anyio.create_task_group() as tasks:
            for number in range(len(self.prompts)):
                tasks.start_soon(self._forward, number, send.clone())
            send.close()
            failure: Exception | None = None
            try:
                async with aclosing(_unpacked(receive)) as deltas:
                    yield deltas
            except Exception as error:  # raised below: out here it would come in an ExceptionGroup
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _forward(
        self, number: int, send: MemoryObjectSendStream[tuple[int, CompletionDelta] | Exception]
    ) -> None:
        with send:
            try:
                async with aclosing(self._of_prompt(number)) as deltas:
                    async for item in deltas:
                        await send.send(item)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # nobody reads any more
            except Exception as error:
                await send.send(error)

    async def _of_prompt(self, number: int) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        request, output = self._requests[number], self.outputs[number]
        clock = self._metrics.start(request)
        iterator = self._engine.generate(request, self.prompts[number].text)
        # Closing it is what aborts the request.
        async with aclosing(cast(AsyncGenerator[CompletionDelta, None], iterator)) as deltas:
            async for delta in deltas:
                clock.observe(delta)
                output.add(delta)
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise _failure(delta)
                yield number, delta


async def _unpacked(
    items: AsyncIterator[tuple[int, CompletionDelta] | Exception],
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    async for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def _failure(delta: CompletionDelta) -> ApiError:
    what = public_text(delta.error or "the request was aborted")
    if delta.failure_id is not None or delta.finish_reason is FinishReason.ABORT:
        return unavailable(what, delta.failure_id)
    return ApiError(500, what)
