"""One sequence while the engine core works on it."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

import numpy as np

from engine.config import EngineLimits
from engine.errors import RequestError
from engine.messages import AddRequest, FinishReason
from engine.sampling_params import SamplingParams

__all__ = ["Request", "RequestStatus", "check_request"]


class RequestStatus(enum.Enum):
    """Where the scheduler has a request."""

    WAITING = "waiting"
    """not in a batch: new, or preempted"""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Tokens, KV blocks and progress of one sequence."""

    request_id: str
    params: SamplingParams
    priority: int
    arrival: int
    """counts requests as they come"""
    key: int
    """64 bits that key the request's random numbers"""
    tokens: np.ndarray
    """int32, as long as the sequence may become: prompt, then output; `num_tokens` are known"""
    prompt_token_ids: np.ndarray
    """int32, the beginning of `tokens`"""
    max_tokens: int
    """of output"""
    stop_token_ids: frozenset[int]
    """what ends the sequence, the end-of-sequence tokens included unless they are ignored"""
    num_tokens: int = 0
    num_computed_tokens: int = 0
    """leading tokens whose K and V are in the cache, counting those of a step that is under way"""
    num_cached_tokens: int = 0
    """prompt tokens that the prefix cache had when the request was first admitted"""
    num_prompt_logprobs: int = 0
    """prompt positions whose log probabilities were reported"""
    status: RequestStatus = RequestStatus.WAITING
    block_table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32, as long as it may become, and a new array each time that blocks are given to a waiting
    sequence; `num_blocks` are held"""
    num_blocks: int = 0
    num_registered_blocks: int = 0
    """leading blocks that the prefix cache knows, or need not be told of"""
    block_hashes: list[bytes] = field(default_factory=list)
    """of the leading full blocks, as far as anyone asked"""

    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @classmethod
    def create(
        cls, message: AddRequest, limits: EngineLimits, eos_token_ids: frozenset[int], arrival: int, key: int
    ) -> Request:
        """The request that `message` asks for; `check_request` passed it."""
        params = message.params
        prompt = np.asarray(message.prompt_token_ids, np.int32)
        room = limits.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        tokens = np.empty(len(prompt) + max_tokens, np.int32)
        tokens[: len(prompt)] = prompt
        return cls(
            request_id=message.request_id,
            params=params,
            priority=message.priority,
            arrival=arrival,
            key=key,
            tokens=tokens,
            prompt_token_ids=tokens[: len(prompt)],
            max_tokens=max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else eos_token_ids),
            num_tokens=len(prompt),
        )

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Log probabilities of prompt positions were asked for and are not all reported."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def output_token_ids(self) -> np.ndarray:
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def blocks(self) -> np.ndarray:
        """int32 [num_blocks]: the physical blocks, in the order of the sequence."""
        return self.block_table[: self.num_blocks]

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token. Tells if the sequence ends with it.

        The last token that `max_tokens` allows ends it too, though its K and V are never computed.
        """
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if token_id in self.stop_token_ids and self.num_output_tokens > self.params.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Identity of full block `index`: a hash over its tokens and, by its parent's hash, all before it."""
        while len(self.block_hashes) <= index:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else b""
            tokens = self.tokens[start : start + block_size].tobytes()
            self.block_hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return self.block_hashes[index]


def check_request(message: AddRequest, limits: EngineLimits) -> None:
    """Refuse what the engine cannot serve.

    Raises
    ------
    RequestError
        One line that names the field and what was expected.
    """
    params, count = message.params, len(message.prompt_token_ids)
    if count == 0:
        raise RequestError("prompt: expected at least one token", field="prompt")
    if count >= limits.max_model_len:
        raise RequestError(
            f"prompt: {count} tokens: expected at most {limits.max_model_len - 1}, "
            f"one less than --max-model-len {limits.max_model_len}",
            field="prompt",
        )
    vocabulary = limits.vocab_size
    for token in (min(message.prompt_token_ids), max(message.prompt_token_ids)):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"prompt: token id {token}: the vocabulary has 0 to {vocabulary - 1}", field="prompt"
            )
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= vocabulary:
                raise RequestError(
                    f"{name}: token id {token}: the vocabulary has 0 to {vocabulary - 1}", field=name
                )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.max_logprobs:
            raise RequestError(
                f"{name}: {getattr(params, name)}: expected at most {limits.max_logprobs} (--max-logprobs)",
                field=name,
            )
