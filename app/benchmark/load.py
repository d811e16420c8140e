"""Open-loop load: requests begin when they are due, whether earlier ones have ended or not.

A closed loop waits for a slow server and then finds that it was fast (coordinated omission; Tene, "How NOT to
Measure Latency"). Here arrivals are drawn first. What holds a request back after that, the limit of
concurrency or this client itself, is measured: latencies are told from when requests were due, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from app.benchmark.client_pool import ClientPool
from app.benchmark.outcome import Outcome
from app.benchmark.workload import Prompt, arrival_times
from app.open_ai import MAX_ERROR_BYTES, ServerError, error_line, is_chat, transport_line
from app.open_ai_stream import AnswerReader, Chunk

__all__ = ["Load", "LoadSettings"]

_DRAIN_SECONDS = 1.0
"""for a connection to show its end after the last event, so that it can be used again"""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What is asked of the server."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    """path; of conversations if it ends with ``/chat/completions``"""
    rate: float = float("inf")
    """requests a second; infinite: all at once"""
    max_concurrency: int | None = None
    output_tokens: int = 128
    ignore_eos: bool = False
    """a field of vLLM's and vtserve's; other servers may refuse it"""
    temperature: float = 0.0
    seed: int = 0
    timeout: float = 600.0
    """seconds without a byte after which a request has failed"""
    api_key: str | None = field(default=None, repr=False)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request for a streamed completion of `prompt`, with usage."""
        asked: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if is_chat(self.endpoint):
            asked["messages"] = [{"role": "user", "content": prompt}]
            asked["max_completion_tokens"] = self.output_tokens
        else:
            asked["prompt"] = prompt
            asked["max_tokens"] = self.output_tokens
        return asked


class Load:
    """One load; it can be looked at after an interruption, too.

    Attributes
    ----------
    outcomes : list of Outcome
        Of the requests that ended, in the order of their ends.
    unfinished : int
        Requests that were due or under way when it was interrupted.
    """

    def __init__(self, settings: LoadSettings, prompts: Sequence[Prompt]) -> None:
        self.settings = settings
        self.outcomes: list[Outcome] = []
        self._prompts = prompts
        self._due = arrival_times(len(prompts), settings.rate, settings.seed)
        self._origin = 0.0
        self._seconds: float | None = None

    @property
    def unfinished(self) -> int:
        return len(self._prompts) - len(self.outcomes)

    @property
    def seconds(self) -> float:
        """How long it took; while it runs, so far."""
        return self._now() if self._seconds is None else self._seconds

    async def run(self, progress: Callable[[int, int], None]) -> None:
        """Ask for a completion of each prompt. Calls `progress` with the requests that ended, and all."""
        settings = self.settings
        slots = None if settings.max_concurrency is None else anyio.Semaphore(settings.max_concurrency)
        async with self._client_pool() as clients:

            async def one(prompt: Prompt, due: float) -> None:
                await anyio.sleep(max(due - self._now(), 0))
                async with slots or nullcontext():
                    with clients.lend() as client:
                        outcome = await self._ask(client, prompt, due)
                self.outcomes.append(outcome)
                progress(len(self.outcomes), len(self._prompts))

            self._origin = time.perf_counter()
            try:
                async with anyio.create_task_group() as tasks:
                    for prompt, due in zip(self._prompts, self._due, strict=True):
                        tasks.start_soon(one, prompt, due)
            finally:
                self._seconds = self._now()

    def _client_pool(self) -> ClientPool:
        """With a client for each of those who come first."""
        settings = self.settings
        first = sum(due == 0 for due in self._due)
        count = min(first, settings.max_concurrency or first)
        return ClientPool(settings.base_url, settings.api_key, settings.timeout, count=count)

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt, due: float) -> Outcome:
        """Ask once. Whatever goes wrong is in the outcome."""
        outcome = Outcome(due, begun=self._now())
        settings = self.settings
        try:
            async with client.stream("POST", settings.endpoint, json=settings.body(prompt)) as response:
                if response.status_code == 200:
                    await self._read(response, outcome)
                else:
                    outcome.error = error_line(response.status_code, await _beginning(response))
        except httpx.HTTPError as error:
            outcome.error = transport_line(error, settings.timeout)
        except ServerError as error:
            outcome.error = str(error)
        # The end of an answer is its last event, not the end of a connection that waits for another request.
        outcome.ended = outcome.ended or self._now()
        return outcome

    async def _read(self, response: httpx.Response, outcome: Outcome) -> None:
        reader = AnswerReader()
        stream = response.aiter_bytes()
        async for received in stream:
            now = self._now()
            for chunk in reader.feed(received):
                _note(chunk, outcome, now)
            if reader.done:
                outcome.ended = now
                with anyio.move_on_after(_DRAIN_SECONDS), suppress(httpx.HTTPError):
                    await anext(stream, None)
                break
        reader.close(response.headers.get("content-type", ""))
        if not outcome.has_usage:
            outcome.output_tokens = len(outcome.token_times)
        elif outcome.output_tokens and not outcome.token_times:
            # The only token is no text: nothing showed it before the end.
            outcome.token_times.append(outcome.ended or self._now())


def _note(chunk: Chunk, outcome: Outcome, now: float) -> None:
    """Write down what `chunk` tells, which came at `now`."""
    if chunk.usage is not None:
        outcome.has_usage = True
        outcome.prompt_tokens = chunk.usage.prompt_tokens
        outcome.output_tokens = chunk.usage.completion_tokens
    if any(choice.has_tokens for choice in chunk.choices or ()):
        outcome.token_times.append(now)


async def _beginning(response: httpx.Response) -> bytes:
    """As much of the body of an error as is read of one."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) >= MAX_ERROR_BYTES:
            break
    return body
