"""The paged KV cache: what a block costs, the tensors, and how sequences come by their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.backend.protocol import Backend, DType, KVLayer, Tensor
from engine.block_pool import BlockPool
from engine.memory.scope import allocation_helper, memory_scope
from engine.request import Request

__all__ = [
    "AttentionStateSpec",
    "KVCache",
    "KVCacheManager",
    "LayerStateSpec",
    "bytes_per_block",
]

EmptyTensor = Callable[[tuple[int, ...], DType], Tensor]
"""Makes an uninitialised tensor: `Backend.empty`, or what stands before it"""


class LayerStateSpec(Protocol):
    """What one layer keeps about each sequence between steps.

    Paged attention is the only kind yet. A recurrent layer's state (one per sequence, not one per token)
    would be another: it asks for memory here, and for its place in a step from `KVCacheManager`.
    """

    @property
    def name(self) -> str:
        """The layer's name in the model: ``model.layers.3``."""

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that a block of `block_size` tokens takes in this layer."""

    def allocate(self, empty: EmptyTensor, num_blocks: int, block_size: int) -> KVLayer:
        """The layer's tensors for `num_blocks` blocks, tagged ``kv/NAME.…``, each made by `empty`."""


@dataclass(frozen=True, slots=True)
class AttentionStateSpec:
    """Keys and values of one attention layer."""

    name: str
    num_kv_heads: int
    head_dim: int
    dtype: DType
    key_scale: float = 1.0
    value_scale: float = 1.0

    def bytes_per_block(self, block_size: int) -> int:
        return 2 * block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, empty: EmptyTensor, num_blocks: int, block_size: int) -> KVLayer:
        shape = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        with memory_scope(f"kv/{self.name}.k"):
            key = empty(shape, self.dtype)
        with memory_scope(f"kv/{self.name}.v"):
            value = empty(shape, self.dtype)
        return KVLayer(key, value, self.key_scale, self.value_scale)


def bytes_per_block(specs: Sequence[LayerStateSpec], block_size: int) -> int:
    """Bytes that a block takes in all layers together. Sizing and allocation both go by it."""
    return sum(spec.bytes_per_block(block_size) for spec in specs)


class KVCache:
    """The tensors of all layers, allocated once by `allocate`."""

    def __init__(self, specs: Sequence[LayerStateSpec], num_blocks: int, block_size: int) -> None:
        self._specs = specs
        self._tensors: list[Tensor] = []
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.nbytes = num_blocks * bytes_per_block(specs, block_size)
        self.layers: list[KVLayer] = []

    def allocate(self, backend: Backend) -> None:
        """Allocate the tensors of all layers.

        Raises
        ------
        OutOfMemoryError
            A layer's tensors do not fit. Those before it stay until `close`: the failure's ledger shows them.
        """

        @allocation_helper
        def empty(shape: tuple[int, ...], dtype: DType) -> Tensor:
            tensor = backend.empty(shape, dtype)
            self._tensors.append(tensor)
            return tensor

        self.layers = [spec.allocate(empty, self.num_blocks, self.block_size) for spec in self._specs]

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.layers.clear()
        while self._tensors:
            self._tensors.pop().buffer.close()


class KVCacheManager:
    """Gives sequences their blocks, out of the prefix cache where it can."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.prefix_queries = 0
        """tokens of admitted sequences that were looked for in the prefix cache"""
        self.prefix_hits = 0
        """tokens that were found there"""

    def admit(self, request: Request, *, headroom: int = 0) -> bool:
        """Give a waiting sequence blocks for all its known tokens; those in the cache count as computed.

        False, and nothing changed, if that would leave fewer than `headroom` blocks free. At least one token
        is left to compute: the next token's logits come of it.
        """
        found = self._find_prefix(request)
        total = self._num_blocks(request.num_tokens)
        taken = total - len(found) + sum(map(self.pool.is_free, found))
        if taken + headroom > self.pool.num_free:
            return False
        for block in found:
            self.pool.hold(block)
        fresh = [self.pool.allocate() for _ in range(total - len(found))]
        # A new array, as long as it may become: who kept the last one sees that its blocks are gone.
        request.block_table = np.empty(self._num_blocks(len(request.tokens)), np.int32)
        request.block_table[:total] = found + fresh
        request.num_blocks = total
        request.num_registered_blocks = len(found)
        request.num_computed_tokens = len(found) * self.block_size
        if self._may_find(request):
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.num_computed_tokens
        return True

    def grow(self, request: Request) -> bool:
        """Give a running sequence the blocks that its known tokens lack. False if there are not enough."""
        lacking = self._num_blocks(request.num_tokens) - request.num_blocks
        if lacking > self.pool.num_free:
            return False
        for _ in range(lacking):
            request.block_table[request.num_blocks] = self.pool.allocate()
            request.num_blocks += 1
        return True

    def register(self, request: Request) -> None:
        """Make the sequence's full blocks findable, as far as they are computed."""
        if not self.prefix_caching:
            return
        full = request.num_computed_tokens // self.block_size
        for index in range(request.num_registered_blocks, full):
            block = int(request.block_table[index])
            self.pool.register(block, request.block_hash(index, self.block_size))
        request.num_registered_blocks = max(request.num_registered_blocks, full)

    def release(self, request: Request, *, valid_tokens: int | None = None) -> None:
        """Take all of a sequence's blocks. The end of a prefix is freed, and reused, before its beginning.

        After a step that failed, only the first `valid_tokens` tokens are sure to be in the cache: the prefix
        cache forgets the blocks behind them.
        """
        blocks = request.blocks.tolist()
        if valid_tokens is not None:
            for block in blocks[valid_tokens // self.block_size :]:
                self.pool.forget(block)
        for block in reversed(blocks):
            self.pool.release(block)
        request.num_blocks = request.num_registered_blocks = request.num_computed_tokens = 0

    def _may_find(self, request: Request) -> bool:
        # Prompt log probabilities need the logits of every prompt position, so all of them are computed.
        return self.prefix_caching and request.params.prompt_logprobs is None

    def _find_prefix(self, request: Request) -> list[int]:
        found: list[int] = []
        if self._may_find(request):
            for index in range((request.num_tokens - 1) // self.block_size):
                block = self.pool.find(request.block_hash(index, self.block_size))
                if block is None:
                    break
                found.append(block)
        return found

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
