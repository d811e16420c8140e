"""The physical blocks of the KV cache: who holds them, what they contain, and which is reused next.

A block is *held* by one or more sequences (its reference count) or *free*. A free block may still contain
what the prefix cache knows by its hash: it stays findable until it is reused. Blocks with nothing to find are
reused first, then the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["BlockPool"]


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Bookkeeping only: no device memory is touched."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # In the order of reuse. An ordered dictionary, because a prefix hit takes a block out of the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can find, held or free."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._references[block]

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def allocate(self) -> int:
        """A free block, held once; what the prefix cache knew of it is forgotten.

        Raises
        ------
        KeyError
            No block is free.
        """
        block, _ = self._free.popitem(last=False)
        self._drop_hash(block)
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Count one more holder of a block that `find` returned."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less. Without any the block is free; its content can be found until it is reused.

        Raises
        ------
        ValueError
            Nobody holds the block.
        """
        if self._references[block] == 0:
            raise ValueError(f"block {block} is released, but nobody holds it")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)

    # -- prefix cache --------------------------------------------------------------------------------------

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, if it is still there."""
        return self._cached.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make the content of a held block findable. The first block with a content stays the one found."""
        if block_hash not in self._cached:
            self._drop_hash(block)
            self._cached[block_hash] = block
            self._hashes[block] = block_hash

    def forget(self, block: int) -> None:
        """Make a block's content unfindable: it was not written, or cannot be trusted."""
        self._drop_hash(block)
        if block in self._free:
            self._free.move_to_end(block, last=False)

    def _drop_hash(self, block: int) -> None:
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._cached[block_hash]
