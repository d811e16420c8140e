"""What a caller gets back: text, tokens and why they ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import FinishReason

__all__ = ["CompletionDelta", "CompletionOutput", "Logprob", "PositionLogprob", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token: natural logarithm, of the raw logits' softmax."""

    token_id: int
    token: str
    """its text alone; a token that is part of a character shows as the replacement character"""
    logprob: float
    rank: int
    """1 for the likeliest"""


@dataclass(frozen=True, slots=True)
class PositionLogprob:
    """The token at one position, and the likeliest ones there."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(slots=True)
class CompletionDelta:
    """What became known about one completion since the delta before."""

    request_id: str
    index: int
    """which of the request's `n` completions"""
    text: str
    """may be empty while a character or a stop string may still be incomplete"""
    token_ids: list[int]
    logprobs: list[PositionLogprob] | None = None
    prompt_logprobs: list[PositionLogprob] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """the stop token or stop string that ended it; None for the end of sequence"""
    error: str | None = None
    failure_id: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprob] | None = None
    """one for each token, if asked for"""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    failure_id: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens' log probabilities; None if they were not asked for."""
        return None if self.logprobs is None else sum(entry.chosen.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A request and all its completions."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids"""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprob | None] | None = None
    """one for each prompt token, if asked for; the first is None, for nothing is before it"""
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """All completions ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def error(self) -> str | None:
        """The first completion's error that failed, if one did."""
        return next((output.error for output in self.outputs if output.error is not None), None)

    def add(self, delta: CompletionDelta) -> None:
        """Append what a delta tells."""
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        if delta.logprobs is not None:
            output.logprobs = [*(output.logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs is not None and delta.index == 0:
            self.prompt_logprobs = [*(self.prompt_logprobs or (None,)), *delta.prompt_logprobs]
        if delta.index == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        output.error = delta.error
        output.failure_id = delta.failure_id
