"""Attention of single tokens over a long past: each key and value is used by a few heads only.

The past is cut into chunks. A chunk's softmax is kept unnormalised, with its largest score, so that chunks
can be computed by different threads and put together afterwards (Dao et al. 2023, Flash-Decoding). They are
put together in the order of their positions, whoever computed them, so a token's result does not depend on
what else is in the batch or on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.attention_past import Past, first_visible
from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import kernel
from engine.backend.cpu.reductions import exponentials, largest
from engine.backend.cpu.register_tiles import store_tile
from engine.backend.cpu.registers import (
    LANES,
    accumulate_broadcast,
    accumulate_rows,
    load,
    load_first,
    prefetch,
    store_quads,
    sum_lanes,
    zeros,
)

__all__ = ["count_chunks", "decode", "decode_parallel", "partial_shape", "scratch_floats"]

_CHUNK = 64
_LONG_CHUNK = 512
_LONG = 8192
"""A token from this position on has long chunks, or there would be too many of them to keep."""
_LINE = 64
"""bytes that are brought near together"""
_QUAD = (0.0,) * 4
"""Four keys and four heads that share them make one register of scores."""


def scratch_floats(num_heads: int, kv_heads: int, head_dim: int) -> int:
    """Scratch that one thread needs."""
    heads, width = partial_shape(num_heads, kv_heads, head_dim)
    floats: int = heads * (2 * width + 2 * _LONG_CHUNK) + 2 * _LONG_CHUNK
    return floats


@kernel()
def partial_shape(num_heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """What a chunk leaves for putting together: for each head the weighted values, peak and weights' sum.

    The heads that share a key are made up to a multiple of 4, the values to whole registers.
    """
    heads = kv_heads * ((num_heads // kv_heads + 3) // 4 * 4)
    return heads, (head_dim + LANES - 1) // LANES * LANES + 2


@kernel()
def chunk_size(position: int) -> int:
    """Positions of one chunk in the past of a token at `position`."""
    return _CHUNK if position < _LONG else _LONG_CHUNK


@kernel()
def count_chunks(positions: np.ndarray, tokens: np.ndarray, window: int) -> int:
    """Chunks in the pasts of all `tokens`, int32 [n]."""
    total = 0
    for t in tokens:
        size = chunk_size(positions[t])
        total += positions[t] // size - first_visible(positions[t], window) // size + 1
    return total


@kernel()
def find_slots(table: np.ndarray, block_size: int, first: int, last: int, slots: np.ndarray) -> None:
    """``slots[j] = block * block_size + offset`` of position ``first + j``; int64 [at least last - first]."""
    for j in range(last - first):
        index = (first + j) // block_size
        slots[j] = np.int64(table[index]) * block_size + (first + j) - index * block_size


@kernel()
def ask_for(cache: np.ndarray, slots: np.ndarray, count: int) -> None:
    """Have `count` slots brought near. Blocks are too short for the hardware to look ahead in them."""
    elements = cache.shape[2] * cache.shape[3]
    for j in range(count):
        for element in range(slots[j] * elements, (slots[j] + 1) * elements, _LINE // cache.itemsize):
            prefetch(cache, element)


@kernel()
def score_keys(
    queries: np.ndarray, cache: np.ndarray, slots: np.ndarray, count: int, scores: np.ndarray
) -> None:
    """Scores of `count` keys: queries [heads, whole registers], slots [count], scores [heads, chunk].

    Behind the last key, up to a multiple of 4, stands its score again.
    """
    heads, width = queries.shape
    kv_heads, head_dim = cache.shape[2], cache.shape[3]
    whole, rest = head_dim // LANES * LANES, head_dim % LANES
    for h in range(0, heads, 4):
        column = h * kv_heads // heads * head_dim
        for j in range(0, count, 4):
            a, b, c, d = zeros(_QUAD), zeros(_QUAD), zeros(_QUAD), zeros(_QUAD)
            at_a = slots[j] * kv_heads * head_dim + column
            at_b = slots[min(j + 1, count - 1)] * kv_heads * head_dim + column
            at_c = slots[min(j + 2, count - 1)] * kv_heads * head_dim + column
            at_d = slots[min(j + 3, count - 1)] * kv_heads * head_dim + column
            for i in range(0, whole, LANES):
                a = accumulate_rows(a, load(cache, at_a + i), queries, h * width + i, width)
                b = accumulate_rows(b, load(cache, at_b + i), queries, h * width + i, width)
                c = accumulate_rows(c, load(cache, at_c + i), queries, h * width + i, width)
                d = accumulate_rows(d, load(cache, at_d + i), queries, h * width + i, width)
            if rest > 0:
                index = h * width + whole
                a = accumulate_rows(a, load_first(cache, at_a + whole, rest), queries, index, width)
                b = accumulate_rows(b, load_first(cache, at_b + whole, rest), queries, index, width)
                c = accumulate_rows(c, load_first(cache, at_c + whole, rest), queries, index, width)
                d = accumulate_rows(d, load_first(cache, at_d + whole, rest), queries, index, width)
            store_quads(scores, h * scores.shape[1] + j, scores.shape[1], sum_lanes(a, b, c, d), _QUAD)


@kernel()
def sum_values(
    weights: np.ndarray, cache: np.ndarray, slots: np.ndarray, count: int, partial: np.ndarray
) -> None:
    """``weights[:count].T @ values``: weights [chunk, heads], partial [heads, whole registers + 2]."""
    heads, width = partial.shape
    kv_heads, head_dim = cache.shape[2], cache.shape[3]
    for h in range(0, heads, 4):
        column = h * kv_heads // heads * head_dim
        for i in range(0, head_dim, LANES):
            sums = zeros(_QUAD)
            if head_dim - i >= LANES:
                for j in range(count):
                    value = load(cache, slots[j] * kv_heads * head_dim + column + i)
                    sums = accumulate_broadcast(sums, value, weights, j * heads + h)
            else:
                for j in range(count):
                    at = slots[j] * kv_heads * head_dim + column + i
                    value = load_first(cache, at, head_dim - i)
                    sums = accumulate_broadcast(sums, value, weights, j * heads + h)
            store_tile(partial, h * width + i, width, sums)


@kernel()
def attend_chunk(
    queries: np.ndarray,
    past: Past,
    table: np.ndarray,
    first: int,
    last: int,
    slots: np.ndarray,
    scores: np.ndarray,
    weights: np.ndarray,
    partial: np.ndarray,
) -> None:
    """Attention of one token over positions first..last, at least one and at most a chunk.

    queries [heads, whole registers], the heads made up as in `partial_shape`. `partial` becomes the values'
    sum weighted by ``exp(score - peak)``, the peak and the weights' sum. slots int64 [chunk], scores [heads,
    chunk] and weights [chunk, heads] are scratch.
    """
    heads, width = partial.shape
    count = last - first
    find_slots(table, past.keys.shape[1], first, last, slots)
    ask_for(past.keys, slots, count)
    ask_for(past.values, slots, count)
    score_keys(queries, past.keys, slots, count, scores)
    for h in range(heads):
        row = scores[h, :count]
        peak = largest(row)
        partial[h, width - 2] = peak
        partial[h, width - 1] = exponentials(row, peak)
        for j in range(count):
            weights[j, h] = row[j]
    sum_values(weights, past.values, slots, count, partial)


@kernel()
def merge(state: np.ndarray, partial: np.ndarray) -> None:
    """Take the next chunk's `partial` into `state`."""
    heads, width = state.shape
    for h in range(heads):
        mine, other = state[h], partial[h]
        peak = max(mine[width - 2], other[width - 2])
        keep, add = exp(mine[width - 2] - peak), exp(other[width - 2] - peak)
        for i in range(width - 2):
            mine[i] = mine[i] * keep + other[i] * add
        mine[width - 2] = peak
        mine[width - 1] = mine[width - 1] * keep + other[width - 1] * add


@kernel()
def finish(state: np.ndarray, past: Past, out: np.ndarray) -> None:
    """Divide by the weights' sum, and leave out what was made up: to out [heads * D]."""
    heads, width = state.shape
    kv_heads, head_dim = past.keys.shape[2], past.keys.shape[3]
    group = past.num_heads // kv_heads
    for h in range(past.num_heads):
        row = state[h // group * (heads // kv_heads) + h % group]
        scale = float32(past.value_scale) / row[width - 1]
        for i in range(head_dim):
            out[h * head_dim + i] = row[i] * scale


@kernel()
def arrange_queries(query: np.ndarray, past: Past, queries: np.ndarray) -> None:
    """One token's heads, times the factor, from [heads * D] to [made-up heads, whole registers]."""
    kv_heads, head_dim = past.keys.shape[2], past.keys.shape[3]
    group, padded = past.num_heads // kv_heads, queries.shape[0] // kv_heads
    queries[:] = float32(0.0)
    for h in range(past.num_heads):
        row = queries[h // group * padded + h % group]
        for i in range(head_dim):
            row[i] = query[h * head_dim + i] * float32(past.factor)


@kernel()
def decode(
    part: int,
    parts: int,
    qkv: np.ndarray,
    past: Past,
    tokens: np.ndarray,
    sequences: np.ndarray,
    scratch: np.ndarray,
    partials: np.ndarray,
    split: bool,
    out: np.ndarray,
) -> None:
    """Part `part` of `parts` of the attention of the step's `tokens`, int32 [n], of `sequences`, int32 [n].

    With `split` chunks are dealt out, and their partials are left in `partials` in the order of tokens and
    positions. Without, tokens are dealt out, and finished into `out` float32 [T, heads * D].

    qkv float32 [T, (heads + 2 kv_heads) * D]; scratch float32 [at least `scratch_floats`]; partials float32.
    """
    heads, width = partial_shape(past.num_heads, past.keys.shape[2], past.keys.shape[3])
    size = heads * width
    begin, end = 0, 2 * _LONG_CHUNK
    slots = scratch[begin:end].view(np.int64)
    begin, end = end, end + heads * (width - 2)
    queries = scratch[begin:end].reshape((heads, width - 2))
    begin, end = end, end + heads * _LONG_CHUNK
    scores = scratch[begin:end].reshape((heads, _LONG_CHUNK))
    begin, end = end, end + heads * _LONG_CHUNK
    weights = scratch[begin:end].reshape((_LONG_CHUNK, heads))
    partial = scratch[end : end + size].reshape((heads, width))
    state = partials[part * size : (part + 1) * size].reshape((heads, width))

    item = 0
    for index in range(tokens.size):
        t, table = tokens[index], past.tables[sequences[index]]
        position = past.positions[t]
        visible, chunk = first_visible(position, past.window), chunk_size(position)
        arrange_queries(qkv[t], past, queries)
        # Chunks begin at multiples of their size, so that a sliding window does not move their borders.
        first = visible // chunk * chunk
        mine = item % parts == part
        for begin in range(first, position + 1, chunk):
            if split:
                mine = item % parts == part
                state = partials[item * size : (item + 1) * size].reshape((heads, width))
                item += 1
            if mine:
                target = state if split or begin == first else partial
                last = min(begin + chunk, position + 1)
                attend_chunk(queries, past, table, max(begin, visible), last, slots, scores, weights, target)
                if not split and begin > first:
                    merge(state, partial)
        if not split:
            if mine:
                finish(state, past, out[t])
            item += 1


@kernel()
def finish_split(past: Past, tokens: np.ndarray, partials: np.ndarray, out: np.ndarray) -> None:
    """Put together what `decode` left in `partials` when it split the work by chunks."""
    heads, width = partial_shape(past.num_heads, past.keys.shape[2], past.keys.shape[3])
    size = heads * width
    item = 0
    for t in tokens:
        position = past.positions[t]
        state = partials[item * size : (item + 1) * size].reshape((heads, width))
        chunk = chunk_size(position)
        chunks = position // chunk - first_visible(position, past.window) // chunk + 1
        for later in range(item + 1, item + chunks):
            merge(state, partials[later * size : (later + 1) * size].reshape((heads, width)))
        finish(state, past, out[t])
        item += chunks


@kernel(parallel=True)
def decode_parallel(
    qkv: np.ndarray,
    past: Past,
    tokens: np.ndarray,
    sequences: np.ndarray,
    scratch: np.ndarray,
    partials: np.ndarray,
    split: bool,
    out: np.ndarray,
) -> None:
    """`decode` in as many parts as `scratch`, [parts, at least `scratch_floats`], has rows."""
    parts = scratch.shape[0]
    for part in prange(parts):
        decode(part, parts, qkv, past, tokens, sequences, scratch[part], partials, split, out)
    if split:
        finish_split(past, tokens, partials, out)
