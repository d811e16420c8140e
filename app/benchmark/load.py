"""Open-loop load: requests begin when they are due, whether earlier ones have ended or not.

A closed loop waits for a slow server and then finds that it was fast (coordinated omission; Tene, "How NOT to
Measure Latency"). Here the arrivals are drawn first: a Poisson process of `rate` requests a second. Where
`max_concurrency` holds a request back, its latency is told from when it was due as well.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from app.sse import iterate_data

__all__ = ["LoadSettings", "Outcome", "Prompt", "arrivals", "random_prompts", "run_load"]

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What is asked of the server."""

    base_url: str
    model: str
    chat: bool = False
    """ask /v1/chat/completions, not /v1/completions"""
    rate: float = float("inf")
    """requests a second; infinite: all at once"""
    max_concurrency: int | None = None
    output_tokens: int = 128
    ignore_eos: bool = True
    """a field of vLLM's and ours; other servers may refuse it"""
    temperature: float = 0.0
    seed: int = 0
    timeout: float = 600.0
    """seconds without a byte after which a request has failed"""
    api_key: str | None = None


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds since the load began."""

    due: float
    begun: float
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    """when each event with text came"""
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token (TTFT)."""
        return self.token_times[0] - self.begun if self.token_times else None

    @property
    def latency(self) -> float:
        """Seconds from its beginning to its end."""
        return self.ended - self.begun

    @property
    def latency_from_due(self) -> float:
        """Seconds from when it was due."""
        return self.ended - self.due

    @property
    def per_output_token(self) -> float | None:
        """Seconds for each token after the first (TPOT)."""
        if self.output_tokens < 2 or self.first_token is None:
            return None
        return (self.ended - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that follow each other (ITL)."""
        return [after - before for before, after in itertools.pairwise(self.token_times)]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When `count` requests are due: a Poisson process of `rate` a second, the first at 0."""
    if rate == float("inf"):
        return [0.0] * count
    random_ = random.Random(seed)
    gaps = [0.0, *(random_.expovariate(rate) for _ in range(count - 1))]
    return list(itertools.accumulate(gaps[:count]))


def random_prompts(count: int, tokens: int, seed: int, *, as_text: bool) -> list[Prompt]:
    """Prompts without common beginnings: token ids, or words of about as many tokens for a conversation."""
    random_ = random.Random(seed)
    if as_text:
        # Short words are mostly a token each; the usage that the server tells is what counts.
        return [" ".join(random_.choice(_WORDS) for _ in range(tokens)) for _ in range(count)]
    # Small ids exist in every vocabulary; the first hundred may be special.
    return [[random_.randrange(100, 16_000) for _ in range(tokens)] for _ in range(count)]


_WORDS = [
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "was",
        "for",
        "on",
        "that",
        "by",
        "this",
        "with",
        "you",
        "it",
        "not",
    ),
    *(
        "water",
        "house",
        "light",
        "small",
        "great",
        "world",
        "night",
        "under",
        "river",
        "stone",
        "paper",
        "green",
    ),
]


async def run_load(
    settings: LoadSettings, prompts: Sequence[Prompt], progress: Callable[[int, int], None]
) -> tuple[list[Outcome], float]:
    """Ask for a completion of each prompt. Returns the outcomes, and how many seconds it took."""
    due = arrivals(len(prompts), settings.rate, settings.seed)
    outcomes: list[Outcome] = []
    limiter = None if settings.max_concurrency is None else anyio.Semaphore(settings.max_concurrency)
    headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
    # One connection a request under way, however many: a pool that queues would hide the server's answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=settings.base_url, headers=headers, timeout=settings.timeout, limits=limits
    ) as client:
        origin = time.perf_counter()

        async def one(prompt: Prompt, at: float) -> None:
            await anyio.sleep(max(at - (time.perf_counter() - origin), 0))
            if limiter is not None:
                await limiter.acquire()
            outcome = Outcome(at, time.perf_counter() - origin)
            try:
                await _ask(client, settings, prompt, outcome, origin)
            finally:
                if limiter is not None:
                    limiter.release()
            outcome.ended = time.perf_counter() - origin
            outcomes.append(outcome)
            progress(len(outcomes), len(prompts))

        async with anyio.create_task_group() as tasks:
            for prompt, at in zip(prompts, due, strict=True):
                tasks.start_soon(one, prompt, at)
        return outcomes, time.perf_counter() - origin


async def _ask(
    client: httpx.AsyncClient, settings: LoadSettings, prompt: Prompt, outcome: Outcome, origin: float
) -> None:
    path = "/v1/chat/completions" if settings.chat else "/v1/completions"
    finished = False
    try:
        async with client.stream("POST", path, json=_body(settings, prompt)) as response:
            if response.status_code != 200:
                outcome.error = _error_of(response.status_code, await response.aread())
                return
            async for data in iterate_data(response.aiter_lines()):
                chunk = json.loads(data)
                if "error" in chunk:
                    outcome.error = str(chunk["error"].get("message", "an error without a message"))
                    return
                if chunk.get("usage"):
                    outcome.prompt_tokens = chunk["usage"]["prompt_tokens"]
                    outcome.output_tokens = chunk["usage"]["completion_tokens"]
                for choice in chunk.get("choices", ()):
                    finished = finished or choice.get("finish_reason") is not None
                    if choice.get("text") or (choice.get("delta") or {}).get("content"):
                        outcome.token_times.append(time.perf_counter() - origin)
    except httpx.TimeoutException:
        outcome.error = f"no byte for {settings.timeout:g} s"
    except httpx.TransportError as error:
        outcome.error = f"{error}" or type(error).__name__
    except (ValueError, KeyError, TypeError, AttributeError):
        outcome.error = "the server sent what is not OpenAI's protocol"
    else:
        if not finished:
            outcome.error = "the stream ended before the completion did"


def _body(settings: LoadSettings, prompt: Prompt) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": settings.model,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        asked["ignore_eos"] = True
    if settings.chat:
        asked["messages"] = [{"role": "user", "content": prompt}]
        asked["max_completion_tokens"] = settings.output_tokens
    else:
        asked["prompt"] = prompt
        asked["max_tokens"] = settings.output_tokens
    return asked


def _error_of(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"{status}: {' '.join(str(message).split())}"
