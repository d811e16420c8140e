"""How many blocks the KV cache gets, and how long a sequence may be then."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig, EngineLimits
from engine.errors import ConfigurationError
from engine.levers import format_size
from engine.memory.errors import describe_bytes

__all__ = ["KVPlan", "fit_length", "least_blocks", "plan_kv_cache"]


class KVPlan(msgspec.Struct, frozen=True):
    """A size of the KV cache, and the limits that go with it."""

    num_blocks: int
    limits: EngineLimits
    """`max_model_len` fits the blocks"""

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.limits.block_size

    @property
    def concurrency(self) -> float:
        """How many sequences of `max_model_len` fit at once."""
        return self.num_blocks / self.limits.max_blocks_per_seq

    def describe(self, nbytes: int, dtype: str) -> str:
        """One line for the log."""
        return (
            f"KV cache: {self.num_tokens:,} tokens in {self.num_blocks:,} blocks "
            f"of {self.limits.block_size}, {describe_bytes(nbytes)} of {dtype}; "
            f"room for {self.concurrency:.2f} sequences of {self.limits.max_model_len:,} tokens"
        )


def fit_length(config: EngineConfig, limits: EngineLimits, block_bytes: int) -> EngineLimits:
    """Limits for the KV cache that `--kv-cache-memory` gives, known before anything is loaded: with a shorter
    `max_model_len` than the model's, if it holds no more.

    Raises
    ------
    ConfigurationError
        It does not hold one sequence of `--max-model-len`, or not even a block.
    """
    given = config.kv_cache_memory
    if given is None:
        return limits
    num_blocks = given // block_bytes
    if num_blocks < 1:
        raise ConfigurationError(
            f"--kv-cache-memory {given}: a block of {limits.block_size} tokens takes {block_bytes} bytes; "
            f"expected at least --kv-cache-memory {block_bytes}"
        )
    if num_blocks >= limits.max_blocks_per_seq:
        return limits
    tokens = num_blocks * limits.block_size
    if config.max_model_len is not None:
        needed = limits.max_blocks_per_seq * block_bytes
        raise ConfigurationError(
            f"--max-model-len {limits.max_model_len} takes {describe_bytes(needed)} of KV cache, and "
            f"--kv-cache-memory {given} holds {tokens} tokens; expected --max-model-len {tokens} or less, "
            f"or --kv-cache-memory {format_size(needed, up=True)[1]} or more"
        )
    return _shorten(limits, tokens)


def least_blocks(config: EngineConfig, limits: EngineLimits, block_bytes: int) -> int:
    """Blocks that will be asked for whatever else takes memory."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory // block_bytes
    return limits.max_blocks_per_seq


def plan_kv_cache(config: EngineConfig, limits: EngineLimits, block_bytes: int, *, available: int) -> KVPlan:
    """How many blocks to allocate: what `--kv-cache-memory` gives, else what `available` bytes hold.

    In the latter case no more than `max_num_seqs` sequences of full length can use; and at least one sequence
    of full length even if that will not fit: the allocation then fails, with everything that is known about
    it. A length that was silently cut would fail later, in somebody's long request.
    """
    num_blocks = least_blocks(config, limits, block_bytes)
    if config.kv_cache_memory is None:
        usable = limits.max_num_seqs * limits.max_blocks_per_seq
        num_blocks = max(num_blocks, min(available // block_bytes, usable))
    if num_blocks < limits.max_blocks_per_seq:
        limits = _shorten(limits, num_blocks * limits.block_size)
    return KVPlan(num_blocks, limits)


def _shorten(limits: EngineLimits, tokens: int) -> EngineLimits:
    return msgspec.structs.replace(limits, max_model_len=min(tokens, limits.max_model_len))
