"""From token ids to the text that a caller reads: detokenisation, stop strings, and the fan-out of `n`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.messages import AddRequest, FinishReason, PositionLogprobs, RequestUpdate
from engine.outputs import CompletionDelta, Logprob, PositionLogprob
from engine.sampling_params import SamplingParams
from engine.stop_strings import StopStrings

__all__ = ["Detokenizer", "OutputProcessor", "ProcessedOutputs", "TextStream"]


class TextStream(Protocol):
    """Text of token ids that come one by one, in whole characters."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """What is left when no more tokens come."""


class Detokenizer(Protocol):
    """The part of the tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`."""

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """A stream for the tokens that come after `prompt_token_ids`."""


@dataclass(slots=True)
class ProcessedOutputs:
    """What a step's updates mean to callers, and what the core has to do about it."""

    deltas: list[CompletionDelta] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    """ids of core requests that met a stop string"""


@dataclass(slots=True, eq=False)
class _Completion:
    """One core request under way."""

    request_id: str
    """the caller's"""
    index: int
    params: SamplingParams
    stream: TextStream
    stop: StopStrings
    num_tokens: int = 0


class OutputProcessor:
    """Turns requests into core requests, and the core's updates into deltas."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._completions: dict[str, _Completion] = {}
        self._token_texts: dict[int, str] = {}

    def add(self, request: AddRequest) -> list[AddRequest]:
        """Messages for the core: one for each of the `n` completions, seeded `seed`, `seed` + 1, …"""
        params, prompt = request.params, request.prompt_token_ids
        messages = []
        for index in range(params.n):
            message = request if params.n == 1 else _one_of_several(request, index)
            messages.append(message)
            self._completions[message.request_id] = _Completion(
                request_id=request.request_id,
                index=index,
                params=params,
                stream=self._tokenizer.stream(prompt, skip_special_tokens=params.skip_special_tokens),
                stop=StopStrings(params.stop, include=params.include_stop_str_in_output),
            )
        return messages

    def forget(self, request_id: str) -> list[str]:
        """Drop a request. Returns the ids of its unfinished core requests, for the core to abort."""
        core_ids = [key for key, state in self._completions.items() if state.request_id == request_id]
        for core_id in core_ids:
            del self._completions[core_id]
        return core_ids

    def process(self, updates: Iterable[RequestUpdate]) -> ProcessedOutputs:
        """Deltas for `updates`. Updates of requests that were forgotten are ignored."""
        processed = ProcessedOutputs()
        for update in updates:
            completion = self._completions.get(update.request_id)
            if completion is None:
                continue
            delta = self._delta(completion, update)
            processed.deltas.append(delta)
            if delta.finish_reason is not None:
                del self._completions[update.request_id]
                if update.finish_reason is None:
                    processed.to_abort.append(update.request_id)
        return processed

    def _delta(self, completion: _Completion, update: RequestUpdate) -> CompletionDelta:
        stop, params = completion.stop, completion.params
        text, count = "", 0
        for token_id in update.new_token_ids:
            count += 1
            completion.num_tokens += 1
            last = count == len(update.new_token_ids)
            # The token that stands for the end is reported, but it is not part of the text.
            if not (last and update.finish_reason is FinishReason.STOP):
                piece = completion.stream.push(token_id)
                text += stop.push(piece, search=completion.num_tokens > params.min_tokens)
            if stop.found is not None:
                break
        delta = CompletionDelta(
            request_id=completion.request_id,
            index=completion.index,
            text=text,
            token_ids=update.new_token_ids[:count],
            num_cached_tokens=update.num_cached_tokens,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_token_id,
            error=update.error,
            failure_id=update.failure_id,
        )
        if update.finish_reason is not None and stop.found is None:
            delta.text += stop.push(completion.stream.finish())
        if stop.found is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, stop.found
        elif update.finish_reason is not None:
            delta.text += stop.flush()
        if update.logprobs is not None:
            delta.logprobs = [self._with_text(position) for position in update.logprobs[:count]]
        if update.prompt_logprobs is not None:
            delta.prompt_logprobs = [self._with_text(position) for position in update.prompt_logprobs]
        return delta

    def _with_text(self, position: PositionLogprobs) -> PositionLogprob:
        return PositionLogprob(
            chosen=Logprob(
                position.token_id, self._token_text(position.token_id), position.logprob, position.rank
            ),
            top=tuple(
                Logprob(token_id, self._token_text(token_id), logprob, rank)
                for rank, (token_id, logprob) in enumerate(
                    zip(position.top_token_ids, position.top_logprobs, strict=True), start=1
                )
            ),
        )

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


def _one_of_several(request: AddRequest, index: int) -> AddRequest:
    params = request.params
    single = msgspec.structs.replace(
        params,
        n=1,
        seed=None if params.seed is None else (params.seed + index) % 2**64,
        # They are the same for all: the first completion reports them.
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )
    return msgspec.structs.replace(request, request_id=f"{request.request_id}/{index}", params=single)
