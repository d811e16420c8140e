"""Attention of a chunk of a prompt: tiles of queries against tiles of keys, with a running softmax.

As FlashAttention does it (Dao et al. 2022): a tile's scores never leave the core's own cache. A row of a
query tile is one head of one token; the heads that share a key stand together. Key tiles begin at multiples
of `KEYS` in the sequence, so a token's result does not depend on how the prompt was cut into chunks.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.attention_past import Past, first_visible
from engine.backend.cpu.cache_elements import decode_element
from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import CONTRACT, kernel
from engine.backend.cpu.matrix import accumulate_product, exponentials, largest

__all__ = ["KEYS", "prefill", "prefill_parallel", "scratch_floats"]

KEYS = 128
"""positions of one tile of keys"""


def scratch_floats(rows: int, head_dim: int) -> int:
    """Scratch that one thread needs for query tiles of `rows` rows."""
    depth = -(-head_dim // 4) * 4
    return rows * (2 * depth + KEYS + 2) + 2 * KEYS * depth


@kernel()
def load_tile(
    cache: np.ndarray, table: np.ndarray, head: int, first: int, count: int, tile: np.ndarray
) -> None:
    """Read `count` positions of one head from `first` on into float32 `tile` [KEYS, depth].

    The rows behind are zeros up to a multiple of 8. The columns behind D are not written.
    """
    _, block_size, _, head_dim = cache.shape
    index, offset = first // block_size, first % block_size
    for j in range(count):
        block = table[index]
        for i in range(head_dim):
            tile[j, i] = decode_element(cache[block, offset, head, i])
        offset += 1
        if offset == block_size:
            index, offset = index + 1, 0
    tile[count : (count + 7) // 8 * 8] = float32(0.0)


@kernel()
def transpose(tile: np.ndarray, count: int, transposed: np.ndarray) -> None:
    """``transposed[i, j] = tile[j, i]`` for the first `count` rows, rounded up to a multiple of 8."""
    for j in range(0, count, 8):
        for i in range(tile.shape[1]):
            for k in range(8):
                transposed[i, j + k] = tile[j + k, i]


@kernel(fastmath=CONTRACT)
def update_softmax(
    scores: np.ndarray, begin: int, end: int, width: int, state: np.ndarray, summed: np.ndarray
) -> None:
    """Turn one row's scores of a tile into weights, those outside begin..end into 0.

    `state` [2] is the row's largest score so far and its weights' sum; it and `summed` are rescaled when the
    tile holds a larger one.
    """
    scores[:begin] = float32(0.0)
    scores[max(begin, end) : width] = float32(0.0)
    if begin >= end:
        return
    seen = scores[begin:end]
    peak = max(state[0], largest(seen))
    total = exponentials(seen, peak)
    keep = exp(state[0] - peak)
    state[0] = peak
    state[1] = state[1] * keep + total
    for i in range(summed.size):
        summed[i] *= keep


@kernel(fastmath=CONTRACT)
def attend_tile(
    qkv: np.ndarray,
    past: Past,
    sequence: int,
    first_token: int,
    head: int,
    first_row: int,
    rows: int,
    scratch: np.ndarray,
    out: np.ndarray,
) -> None:
    """Rows from `first_row` on of one sequence's chunk: row r is head ``r % G`` of token ``r // G``.

    `first_token` is the chunk's first in the step; the other arrays are those of `prefill`.
    """
    kv_heads, head_dim = past.keys.shape[2], past.keys.shape[3]
    group = past.num_heads // kv_heads
    depth = (head_dim + 3) // 4 * 4
    begin, end = 0, rows * depth
    query = scratch[begin:end].reshape((rows, depth))
    begin, end = end, end + rows * depth
    summed = scratch[begin:end].reshape((rows, depth))
    begin, end = end, end + rows * KEYS
    scores = scratch[begin:end].reshape((rows, KEYS))
    begin, end = end, end + 2 * rows
    state = scratch[begin:end].reshape((rows, 2))
    begin, end = end, end + depth * KEYS
    keys = scratch[begin:end].reshape((depth, KEYS))
    begin, end = end, end + depth * KEYS
    values = scratch[begin:end].reshape((KEYS, depth))
    table, window = past.tables[sequence], past.window
    first_position = past.positions[first_token]

    values[:, head_dim:] = float32(0.0)
    for r in range(rows):
        t = first_token + (first_row + r) // group
        column = (head * group + (first_row + r) % group) * head_dim
        for i in range(head_dim):
            query[r, i] = qkv[t, column + i] * float32(past.factor)
        query[r, head_dim:] = float32(0.0)
        summed[r, :] = float32(0.0)
        state[r, 0] = float32(-np.inf)
        state[r, 1] = float32(0.0)

    begin = first_visible(first_position + first_row // group, window) // KEYS * KEYS
    end = first_position + (first_row + rows - 1) // group + 1
    for first in range(begin, end, KEYS):
        count = min(KEYS, end - first)
        width = (count + 3) // 4 * 4
        load_tile(past.keys, table, head, first, count, values)
        transpose(values, count, keys)
        scores[:, :width] = float32(0.0)
        accumulate_product(query, keys, scores, rows, depth, count)
        load_tile(past.values, table, head, first, count, values)
        for r in range(rows):
            position = first_position + (first_row + r) // group
            low = max(first_visible(position, window) - first, 0)
            high = min(position + 1 - first, count)
            update_softmax(scores[r], min(low, width), high, width, state[r], summed[r])
        accumulate_product(scores, values, summed, rows, width, depth)
    for r in range(rows):
        t = first_token + (first_row + r) // group
        column = (head * group + (first_row + r) % group) * head_dim
        scale = float32(past.value_scale) / state[r, 1]
        for i in range(head_dim):
            out[t, column + i] = summed[r, i] * scale


@kernel()
def prefill(
    part: int,
    parts: int,
    qkv: np.ndarray,
    past: Past,
    query_start: np.ndarray,
    sequences: np.ndarray,
    tile_rows: int,
    scratch: np.ndarray,
    out: np.ndarray,
) -> None:
    """Part `part` of `parts` of the attention of all tokens of `sequences`, int32 [n]; tiles are dealt out.

    qkv float32 [T, (heads + 2 kv_heads) * D]; query_start int32 [S + 1]; scratch float32, `scratch_floats` of
    `tile_rows`; out float32 [T, heads * D].
    """
    kv_heads = past.keys.shape[2]
    item = 0
    for s in sequences:
        first, last = query_start[s], query_start[s + 1]
        total = (last - first) * (past.num_heads // kv_heads)
        for row in range(0, total, tile_rows):
            for h in range(kv_heads):
                if item % parts == part:
                    rows = min(tile_rows, total - row)
                    attend_tile(qkv, past, s, first, h, row, rows, scratch, out)
                item += 1


@kernel(parallel=True)
def prefill_parallel(
    qkv: np.ndarray,
    past: Past,
    query_start: np.ndarray,
    sequences: np.ndarray,
    tile_rows: int,
    scratch: np.ndarray,
    out: np.ndarray,
) -> None:
    """`prefill` in as many parts as `scratch`, [parts, at least `scratch_floats`], has rows."""
    parts = scratch.shape[0]
    for part in prange(parts):
        prefill(part, parts, qkv, past, query_start, sequences, tile_rows, scratch[part], out)
