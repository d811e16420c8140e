"""What a token attends to, as the attention kernels are told of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.backend.cpu.jit import kernel

__all__ = ["Past", "first_visible"]


class Past(NamedTuple):
    """One layer's cache and what a step's tokens see of it. Compiled kernels take it apart."""

    positions: np.ndarray
    """int32 [T]"""
    tables: np.ndarray
    """int32 [S, B]: physical blocks of each sequence"""
    keys: np.ndarray
    """[blocks, block_size, kv_heads, D] in the cache's carrier"""
    values: np.ndarray
    """like `keys`"""
    value_scale: float
    num_heads: int
    factor: float
    """multiplies q·k as it is stored: the softmax scale times the key scale"""
    window: int
    """a token sees itself and this many - 1 tokens before it; 0: all"""


@kernel()
def first_visible(position: int, window: int) -> int:
    """The earliest position that a token at `position` sees."""
    return max(position + 1 - window, 0) if window > 0 else 0
