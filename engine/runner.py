"""Runs a scheduled batch on the model: lays out its inputs, calls the model, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine.backend.protocol import Backend, KVLayer, StepInputs, Tensor
from engine.batch_layout import BatchLayout
from engine.config import EngineLimits
from engine.memory.scope import request_scope
from engine.sampler import INVALID_TOKEN, PendingTokens, SampledTokens, SamplingRow, TokenLogprobs
from engine.scheduler import ScheduledRequest

__all__ = ["LaunchedStep", "Model", "ModelRunner", "RequestResult"]


class Model(Protocol):
    """A model whose weights and workspace are in place."""

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> Tensor:
        """Logits, float32 [R, V], of the rows that `inputs` asks for."""


@dataclass(slots=True, eq=False)
class RequestResult:
    """What a step found out about one sequence."""

    scheduled: ScheduledRequest
    token_id: int | None = None
    """the next token, if the step reached the end of the known ones"""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    unusable: bool = False
    """the logits were not numbers; nothing else is set"""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that the device computes."""

    scheduled: Sequence[ScheduledRequest]
    rows: Sequence[SamplingRow]
    tokens: PendingTokens


class ModelRunner:
    """The model with its cache, and a layout to fill for each step."""

    def __init__(
        self, model: Model, backend: Backend, kv_layers: Sequence[KVLayer], limits: EngineLimits
    ) -> None:
        self._backend = backend
        self._forward = partial(model.forward, kv=kv_layers)
        self._layout = BatchLayout(limits)

    @property
    def runs_ahead(self) -> bool:
        """A launched step runs while the host does something else."""
        return self._backend.runs_ahead

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin to compute the scheduled tokens, and the next token of each sequence that is at its end.

        The step must be collected before the next one is launched.

        Raises
        ------
        AllocationError
            The device failed to give memory, or was lost. The cache behind each `start` is undefined.
        """
        with request_scope(item.request.request_id for item in scheduled):
            inputs = self._backend.prepare(self._layout.fill(scheduled))
            logits = self._backend.run(self._forward, inputs)
            rows = sampling_rows(scheduled)
            return LaunchedStep(scheduled, rows, self._backend.sample(logits, rows))

    def collect(self, step: LaunchedStep) -> list[RequestResult]:
        """What the step found out, when it is computed. Raises as `launch` does."""
        with request_scope(item.request.request_id for item in step.scheduled):
            sampled = step.tokens.wait()
        return _results(step.scheduled, step.rows, sampled)


def sampling_rows(scheduled: Sequence[ScheduledRequest]) -> list[SamplingRow]:
    """What each row of logits is wanted for, in the order of `BatchLayout`'s rows."""
    rows = []
    for item in scheduled:
        request = item.request
        output = request.output_token_ids
        forbidden = tuple(request.stop_token_ids) if len(output) < request.params.min_tokens else ()
        for position in range(item.logits_start, item.end):
            known = position + 1 < request.num_tokens
            rows.append(
                SamplingRow(
                    request.request_id,
                    request.params,
                    request.key,
                    position + 1,
                    request.prompt_token_ids,
                    output,
                    forbidden,
                    int(request.tokens[position + 1]) if known else None,
                )
            )
    return rows


def _results(
    scheduled: Sequence[ScheduledRequest], rows: Sequence[SamplingRow], sampled: SampledTokens
) -> list[RequestResult]:
    results = []
    r = 0
    for item in scheduled:
        result = RequestResult(item)
        for _ in range(item.logits_start, item.end):
            token, logprobs = int(sampled.token_ids[r]), sampled.logprobs[r]
            if token == INVALID_TOKEN:
                result.unusable = True
            elif rows[r].target_token_id is None:
                result.token_id, result.logprobs = token, logprobs
            elif logprobs is not None:
                result.prompt_logprobs.append(logprobs)
            r += 1
        results.append(result)
    return results
