"""What became of one request, and the latencies that follow from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

__all__ = ["Outcome"]


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds since the load began."""

    due: float
    """when the request arrived, as it was drawn"""
    begun: float
    """when it was sent"""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """both as the server's usage tells; without it an event counts as a token"""
    has_usage: bool = False
    token_times: list[float] = field(default_factory=list)
    """when each event with tokens came"""
    error: str | None = None

    @property
    def start_delay(self) -> float:
        """Seconds that it was held back, by ``--max-concurrency`` or a client too busy to send it."""
        return self.begun - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token; None if none came."""
        return self.token_times[0] - self.begun if self.token_times else None

    @property
    def ttft_from_arrival(self) -> float | None:
        """The same, from when it was due."""
        return self.token_times[0] - self.due if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, in the mean; None for fewer than two tokens."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between events that follow each other. An event may have several tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times)]

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return self.ended - self.begun

    @property
    def latency_from_arrival(self) -> float:
        """The same, from when it was due."""
        return self.ended - self.due
