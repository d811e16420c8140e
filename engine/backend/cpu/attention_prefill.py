"""Attention of a chunk of a prompt: tiles of queries against tiles of keys, with a running softmax.

As FlashAttention does it (Dao et al. 2022): a tile's scores never leave the core's own cache. A row of a
query tile is one head of one token; the heads that share a key stand together. A tile's arrays have their
rows last: each row has a lane of the vector registers to itself, and nothing is summed across lanes.

Key tiles begin at multiples of `KEYS` in the sequence, and a row's numbers are combined in the same order in
whichever lane it is: a token's result does not depend on how the prompt was cut into chunks.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.attention_past import Past, first_visible
from engine.backend.cpu.cache_elements import decode_element
from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import CONTRACT, kernel
from engine.backend.cpu.register_tiles import load_tile, scale_tile, store_tile
from engine.backend.cpu.registers import LANES, WIDE, accumulate_broadcast, load, zeros

__all__ = ["KEYS", "prefill", "prefill_parallel", "scratch_floats"]

KEYS = 128
"""positions of one tile of keys"""
_SUMS = (0.0,) * (16 if WIDE else 4)
"""as many registers as there are to sum up in"""
_LOWEST = float32(np.finfo(np.float32).min)


def scratch_floats(rows: int, head_dim: int) -> int:
    """Scratch that one thread needs for query tiles of `rows` rows, a multiple of 16."""
    depth = -(-head_dim // LANES) * LANES
    return rows * (2 * depth + KEYS + 3) + 2 * KEYS * depth


@kernel()
def whole_registers(count: int) -> int:
    """`count` rounded up to a multiple of 16."""
    return (count + LANES - 1) // LANES * LANES


@kernel()
def load_positions(
    cache: np.ndarray, table: np.ndarray, head: int, first: int, count: int, rows: np.ndarray
) -> None:
    """Read `count` positions of one head from `first` on into float32 `rows` [KEYS, depth].

    The rows behind are zeros up to a multiple of 16. The columns behind D are not written.
    """
    _, block_size, _, head_dim = cache.shape
    index, offset = first // block_size, first % block_size
    for j in range(count):
        block = table[index]
        for i in range(head_dim):
            rows[j, i] = decode_element(cache[block, offset, head, i])
        offset += 1
        if offset == block_size:
            index, offset = index + 1, 0
    rows[count : whole_registers(count)] = float32(0.0)


@kernel()
def transpose(rows: np.ndarray, count: int, transposed: np.ndarray) -> None:
    """``transposed[i, j] = rows[j, i]`` for the first `count` rows, rounded up to a multiple of 16."""
    for j in range(0, count, LANES):
        for i in range(rows.shape[1]):
            for k in range(LANES):
                transposed[i, j + k] = rows[j + k, i]


@kernel()
def visible_keys(row: int, first_row: int, group: int, count: int) -> int:
    """How many of `count` keys a row sees, windows aside; key j is at row ``first_row + j * group``."""
    return min(max((row - first_row) // group + 1, 0), count)


@kernel()
def score_tile(
    queries: np.ndarray, keys: np.ndarray, count: int, first_row: int, group: int, scores: np.ndarray
) -> None:
    """``scores[j] = keys[:, j] @ queries`` for `count` keys, as far as rows see them, and some more.

    queries [D, rows], keys [at least D, KEYS], scores [KEYS, rows], rows a multiple of 16. Each score is a
    chain of fused multiply-adds in the order of the depth.
    """
    depth, rows = queries.shape
    for r in range(0, rows, LANES):
        for j in range(0, visible_keys(r + LANES - 1, first_row, group, count), len(_SUMS)):
            sums = zeros(_SUMS)
            for d in range(depth):
                sums = accumulate_broadcast(sums, load(queries, d * rows + r), keys, d * KEYS + j)
            store_tile(scores, j * rows + r, rows, sums)


@kernel()
def sum_tile(
    weights: np.ndarray,
    values: np.ndarray,
    count: int,
    first_row: int,
    group: int,
    factors: np.ndarray,
    summed: np.ndarray,
) -> None:
    """``summed = summed * factors + values.T @ weights`` for `count` keys, as far as rows see them.

    weights [KEYS, rows], values [KEYS, depth], factors [rows], summed [depth, rows]; depth and rows are
    multiples of 16.
    """
    depth, rows = summed.shape
    for r in range(0, rows, LANES):
        visible = visible_keys(r + LANES - 1, first_row, group, count)
        for i in range(0, depth, len(_SUMS)):
            sums = scale_tile(load_tile(summed, i * rows + r, rows, _SUMS), load(factors, r))
            for j in range(visible):
                sums = accumulate_broadcast(sums, load(weights, j * rows + r), values, j * depth + i)
            store_tile(summed, i * rows + r, rows, sums)


@kernel()
def visible_rows(row: int, window: int, rows: int) -> tuple[int, int]:
    """The first of a tile's rows that sees a key, and the first after it that does not.

    `row` is the first one of the key's own token, which may lie before or behind the tile. `window` is in
    rows.
    """
    low = min(max(row, 0), rows)
    return low, min(max(row + window, low), rows) if window > 0 else rows


@kernel(fastmath=CONTRACT)
def update_softmax(
    scores: np.ndarray,
    count: int,
    first_row: int,
    group: int,
    window: int,
    rows: int,
    peaks: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
) -> None:
    """Turn the scores of `count` keys [KEYS, rows] into weights; where a row does not see a key into 0.

    The token of key j is at row ``first_row + j * group``, and `window` is in positions. peaks [rows] are the
    largest scores so far, totals [rows] the weights' sums; factors [rows] becomes what is to be multiplied
    with what was summed up before. Rows from `rows` on see nothing.
    """
    for r in range(peaks.size):
        factors[r] = peaks[r]
    for j in range(count):
        low, high = visible_rows(first_row + j * group, window * group, rows)
        row, largest = scores[j, low:high], peaks[low:high]
        for r in range(row.size):
            largest[r] = row[r] if row[r] > largest[r] else largest[r]
    for r in range(peaks.size):
        factors[r] = exp(factors[r] - peaks[r])
        totals[r] *= factors[r]
    for j in range(count):
        low, high = visible_rows(first_row + j * group, window * group, rows)
        scores[j, :low] = float32(0.0)
        scores[j, high:] = float32(0.0)
        row, largest, total = scores[j, low:high], peaks[low:high], totals[low:high]
        for r in range(row.size):
            weight = exp(row[r] - largest[r])
            row[r] = weight
            total[r] += weight


@kernel()
def attend_tile(
    qkv: np.ndarray,
    past: Past,
    sequence: int,
    first_token: int,
    head: int,
    first_row: int,
    count: int,
    scratch: np.ndarray,
    out: np.ndarray,
) -> None:
    """`count` rows from `first_row` on of one sequence's chunk: row r is head ``r % G`` of token ``r // G``.

    `first_token` is the chunk's first in the step; the other arrays are those of `prefill`.
    """
    kv_heads, head_dim = past.keys.shape[2], past.keys.shape[3]
    group = past.num_heads // kv_heads
    rows, depth = whole_registers(count), whole_registers(head_dim)
    begin, end = 0, head_dim * rows
    queries = scratch[begin:end].reshape((head_dim, rows))
    begin, end = end, end + depth * rows
    summed = scratch[begin:end].reshape((depth, rows))
    begin, end = end, end + KEYS * rows
    scores = scratch[begin:end].reshape((KEYS, rows))
    begin, end = end, end + rows
    peaks = scratch[begin:end]
    begin, end = end, end + rows
    totals = scratch[begin:end]
    begin, end = end, end + rows
    factors = scratch[begin:end]
    begin, end = end, end + KEYS * depth
    loaded = scratch[begin:end].reshape((KEYS, depth))
    begin, end = end, end + KEYS * depth
    keys = scratch[begin:end].reshape((depth, KEYS))

    queries[:, count:] = float32(0.0)
    for r in range(count):
        t, h = first_token + (first_row + r) // group, head * group + (first_row + r) % group
        for i in range(head_dim):
            queries[i, r] = qkv[t, h * head_dim + i] * float32(past.factor)
    loaded[:, head_dim:] = float32(0.0)
    summed[:] = float32(0.0)
    peaks[:] = _LOWEST
    totals[:] = float32(0.0)

    table, first_query = past.tables[sequence], past.positions[first_token] * group + first_row
    begin = first_visible(first_query // group, past.window) // KEYS * KEYS
    end = (first_query + count - 1) // group + 1
    for first in range(begin, end, KEYS):
        size = min(KEYS, end - first)
        load_positions(past.keys, table, head, first, size, loaded)
        transpose(loaded, size, keys)
        row = first * group - first_query
        score_tile(queries, keys, size, row, group, scores)
        update_softmax(scores, size, row, group, past.window, count, peaks, totals, factors)
        load_positions(past.values, table, head, first, size, loaded)
        sum_tile(scores, loaded, size, row, group, factors, summed)
    for r in range(count):
        t, h = first_token + (first_row + r) // group, head * group + (first_row + r) % group
        scale = float32(past.value_scale) / totals[r]
        for i in range(head_dim):
            out[t, h * head_dim + i] = summed[i, r] * scale


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
