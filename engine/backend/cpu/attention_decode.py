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
from engine.backend.cpu.cache_elements import decode_element
from engine.backend.cpu.exponential import exp
from engine.backend.cpu.jit import CONTRACT, kernel
from engine.backend.cpu.matrix import add_weighted_rows, dot, exponentials, largest

__all__ = ["count_chunks", "decode", "decode_parallel", "partial_floats", "scratch_floats"]

_CHUNK = 64
_LONG_CHUNK = 512
_LONG = 8192
"""A token from this position on has long chunks, or there would be too many of them to keep."""
_ROWS = 16
"""positions whose keys, or values, of all heads are read at once"""


def scratch_floats(num_heads: int, kv_heads: int, head_dim: int) -> int:
    """Scratch that one thread needs."""
    return _ROWS * kv_heads * head_dim + num_heads * _LONG_CHUNK + partial_floats(num_heads, head_dim)


def partial_floats(num_heads: int, head_dim: int) -> int:
    """What a chunk leaves for putting together: each head's weighted values, peak and weights' sum."""
    return num_heads * (head_dim + 2)


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
def load_rows(cache: np.ndarray, table: np.ndarray, first: int, last: int, rows: np.ndarray) -> None:
    """Read positions first..last of all heads into float32 `rows` [at least last - first, kv_heads * D].

    The rows behind are zeros up to a multiple of 4.
    """
    block_size, width = cache.shape[1], rows.shape[1]
    source, target = cache.reshape(-1), rows.reshape(-1)
    position = first
    while position < last:
        index = position // block_size
        end = min((index + 1) * block_size, last)
        # One loop over all heads of all these positions: they lie side by side.
        begin = (table[index] * block_size + position - index * block_size) * width
        elements = source[begin : begin + (end - position) * width]
        floats = target[(position - first) * width : (end - first) * width]
        for i in range(floats.size):
            floats[i] = decode_element(elements[i])
        position = end
    count = last - first
    target[count * width : (count + 3) // 4 * 4 * width] = float32(0.0)


@kernel(fastmath=CONTRACT)
def attend_chunk(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    table: np.ndarray,
    first: int,
    last: int,
    factor: float32,
    rows: np.ndarray,
    weights: np.ndarray,
    partial: np.ndarray,
) -> None:
    """Attention of `query` [heads, D] over positions first..last, at least one and at most a chunk.

    `partial` [heads, D + 2] becomes the values' sum weighted by ``exp(score - peak)``, then the peak, then
    the weights' sum. rows [_ROWS, kv_heads * D] and weights [heads, chunk] are scratch.
    """
    num_heads, head_dim = query.shape
    group = num_heads // key_cache.shape[2]
    for begin in range(first, last, _ROWS):
        end = min(begin + _ROWS, last)
        load_rows(key_cache, table, begin, end, rows)
        for h in range(num_heads):
            column = h // group * head_dim
            for j in range(end - begin):
                score = dot(query[h], rows[j, column : column + head_dim])
                weights[h, begin - first + j] = score * factor
    count = last - first
    for h in range(num_heads):
        scores = weights[h, :count]
        peak = largest(scores)
        partial[h, head_dim] = peak
        partial[h, head_dim + 1] = exponentials(scores, peak)
        partial[h, :head_dim] = float32(0.0)
        weights[h, count : (count + 3) // 4 * 4] = float32(0.0)
    for begin in range(first, last, _ROWS):
        end = min(begin + _ROWS, last)
        load_rows(value_cache, table, begin, end, rows)
        depth = (end - begin + 3) // 4 * 4
        for h in range(num_heads):
            add_weighted_rows(
                weights[h, begin - first :], rows, h // group * head_dim, partial[h], depth, head_dim
            )


@kernel(fastmath=CONTRACT)
def merge(state: np.ndarray, partial: np.ndarray) -> None:
    """Take the next chunk's `partial` into `state`; both [heads, D + 2]."""
    num_heads, head_dim = state.shape[0], state.shape[1] - 2
    for h in range(num_heads):
        mine, other = state[h], partial[h]
        peak = max(mine[head_dim], other[head_dim])
        keep, add = exp(mine[head_dim] - peak), exp(other[head_dim] - peak)
        for i in range(head_dim):
            mine[i] = mine[i] * keep + other[i] * add
        mine[head_dim] = peak
        mine[head_dim + 1] = mine[head_dim + 1] * keep + other[head_dim + 1] * add


@kernel()
def finish(state: np.ndarray, value_scale: float, out: np.ndarray) -> None:
    """Divide by the weights' sum: state [heads, D + 2] to out [heads * D]."""
    num_heads, head_dim = state.shape[0], state.shape[1] - 2
    for h in range(num_heads):
        scale = float32(value_scale) / state[h, head_dim + 1]
        for i in range(head_dim):
            out[h * head_dim + i] = state[h, i] * scale


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
    num_heads, kv_heads, head_dim = past.num_heads, past.keys.shape[2], past.keys.shape[3]
    size = num_heads * (head_dim + 2)
    begin, end = 0, _ROWS * kv_heads * head_dim
    rows = scratch[begin:end].reshape((_ROWS, kv_heads * head_dim))
    begin, end = end, end + num_heads * _LONG_CHUNK
    weights = scratch[begin:end].reshape((num_heads, _LONG_CHUNK))
    partial = scratch[end : end + size].reshape((num_heads, head_dim + 2))
    state = partials[part * size : (part + 1) * size].reshape((num_heads, head_dim + 2))

    item = 0
    for index in range(tokens.size):
        t, table = tokens[index], past.tables[sequences[index]]
        position = past.positions[t]
        visible, chunk = first_visible(position, past.window), chunk_size(position)
        query = qkv[t, : num_heads * head_dim].reshape((num_heads, head_dim))
        # Chunks begin at multiples of their size, so that a sliding window does not move their borders.
        first = visible // chunk * chunk
        mine = item % parts == part
        for begin in range(first, position + 1, chunk):
            if split:
                mine = item % parts == part
                state = partials[item * size : (item + 1) * size].reshape((num_heads, head_dim + 2))
                item += 1
            if mine:
                attend_chunk(
                    query,
                    past.keys,
                    past.values,
                    table,
                    max(begin, visible),
                    min(begin + chunk, position + 1),
                    float32(past.factor),
                    rows,
                    weights,
                    state if split or begin == first else partial,
                )
                if not split and begin > first:
                    merge(state, partial)
        if not split:
            if mine:
                finish(state, past.value_scale, out[t])
            item += 1


@kernel()
def finish_split(past: Past, tokens: np.ndarray, partials: np.ndarray, out: np.ndarray) -> None:
    """Put together what `decode` left in `partials` when it split the work by chunks."""
    num_heads, head_dim = past.num_heads, past.keys.shape[3]
    size = num_heads * (head_dim + 2)
    item = 0
    for t in tokens:
        position = past.positions[t]
        state = partials[item * size : (item + 1) * size].reshape((num_heads, head_dim + 2))
        chunk = chunk_size(position)
        chunks = position // chunk - first_visible(position, past.window) // chunk + 1
        for later in range(item + 1, item + chunks):
            merge(state, partials[later * size : (later + 1) * size].reshape((num_heads, head_dim + 2)))
        finish(state, past.value_scale, out[t])
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
