"""What goes into the engine core and what comes out of it: plain, typed, and fit for another process."""

from __future__ import annotations

import enum

import msgspec

from engine.sampling_params import SamplingParams

__all__ = [
    "Abort",
    "AddRequest",
    "EngineFailed",
    "EngineMessage",
    "EngineStats",
    "FinishReason",
    "OutputMessage",
    "PositionLogprobs",
    "RequestUpdate",
    "Shutdown",
    "StepOutputs",
]


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """end of sequence, a stop token or a stop string"""
    LENGTH = "length"
    """`max_tokens`, or the model's length"""
    ABORT = "abort"
    ERROR = "error"


# -- into the core -----------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """One sequence to generate. `params.n` and `params.stop` are the output processor's, not the core's."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    """lower goes first under the policy ``priority``"""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests. Unknown ids are ignored: a request may have ended meanwhile."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the busy loop."""


EngineMessage = AddRequest | Abort | Shutdown


# -- out of the core ---------------------------------------------------------------------------------------


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: of the token that is there, and of the likeliest."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest"""
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestUpdate(msgspec.Struct, kw_only=True):
    """What a step did for one request."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    """one for each new token, if asked for"""
    prompt_logprobs: list[PositionLogprobs] | None = None
    """of prompt positions from 1 on, in order, as far as they are known since the last update"""
    num_cached_tokens: int = 0
    """prompt tokens that the prefix cache had"""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """the token out of `stop_token_ids` that ended the request; None for the end of sequence"""
    error: str | None = None
    """one line, with the finish reason ``error``"""
    failure_id: str | None = None
    """the failure record that tells more"""


class EngineStats(msgspec.Struct, kw_only=True):
    """The engine after a step. Counts are since it started."""

    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    prefill_tokens: int
    """of this step"""
    decode_tokens: int
    """of this step"""
    preemptions: int
    prefix_queries: int
    """tokens that were looked for in the prefix cache"""
    prefix_hits: int
    """tokens that were found"""

    @property
    def kv_cache_usage(self) -> float:
        """Part of the KV blocks that running requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks


class StepOutputs(msgspec.Struct, tag="step"):
    """The outcome of one step."""

    updates: list[RequestUpdate]
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The busy loop threw. The last message of a core."""

    what: str
    failure_id: str


OutputMessage = StepOutputs | EngineFailed
