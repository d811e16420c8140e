"""Rotary position embedding (Su et al. 2021) of q and k, and the way of k and v into the paged cache."""

from __future__ import annotations

import math

import numpy as np
from numba import prange
from numpy import float32

from engine.backend.cpu.cache_elements import store_row
from engine.backend.cpu.jit import kernel
from engine.backend.cpu.norm import normalise

__all__ = ["rope_and_store_kv", "rope_and_store_kv_parallel"]


@kernel()
def rotate(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> None:
    """Turn the pairs (x[i], x[i + D/2]) of one head, in place. x [D], cosine and sine [D/2]."""
    half = x.size // 2
    low, high = x[:half], x[half:]
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = a * cosine[i] - b * sine[i]
        high[i] = b * cosine[i] + a * sine[i]


@kernel()
def rope_and_store_kv(
    qkv: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    key_scale: float,
    value_scale: float,
    num_heads: int,
    inv_freq: np.ndarray,
    magnitude: float,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: float,
    scratch: np.ndarray,
) -> None:
    """Norm, rotate and store the heads of T tokens.

    qkv float32 [T, (heads + 2 kv_heads) * D], its q and k parts are changed in place; caches [blocks,
    block_size, kv_heads, D]; inv_freq [D/2]; q_norm and k_norm [D], or empty for no norm; scratch at least
    [D].

    Angles are products in float32, as in the reference implementations: in float64 they would differ by 1e-4
    at position 4096.
    """
    _, block_size, kv_heads, head_dim = key_cache.shape
    half = head_dim // 2
    cosine, sine = scratch[:half], scratch[half:head_dim]
    for t in range(qkv.shape[0]):
        position = float32(positions[t])
        for i in range(half):
            angle = position * inv_freq[i]
            cosine[i] = math.cos(angle) * float32(magnitude)
            sine[i] = math.sin(angle) * float32(magnitude)
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(num_heads):
            query = qkv[t, h * head_dim : (h + 1) * head_dim]
            if q_norm.size:
                normalise(query, q_norm, eps, query)
            rotate(query, cosine, sine)
        for h in range(kv_heads):
            begin = (num_heads + h) * head_dim
            key = qkv[t, begin : begin + head_dim]
            if k_norm.size:
                normalise(key, k_norm, eps, key)
            rotate(key, cosine, sine)
            store_row(key, float32(key_scale), key_cache[block, offset, h])
            begin += kv_heads * head_dim
            store_row(qkv[t, begin : begin + head_dim], float32(value_scale), value_cache[block, offset, h])


@kernel(parallel=True)
def rope_and_store_kv_parallel(
    qkv: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    key_scale: float,
    value_scale: float,
    num_heads: int,
    inv_freq: np.ndarray,
    magnitude: float,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    eps: float,
    scratch: np.ndarray,
) -> None:
    """`rope_and_store_kv` with the tokens in as many parts as `scratch`, [parts, at least D], has rows."""
    tokens, parts = qkv.shape[0], scratch.shape[0]
    for part in prange(parts):
        first, last = tokens * part // parts, tokens * (part + 1) // parts
        rope_and_store_kv(
            qkv[first:last],
            positions[first:last],
            slots[first:last],
            key_cache,
            value_cache,
            key_scale,
            value_scale,
            num_heads,
            inv_freq,
            magnitude,
            q_norm,
            k_norm,
            eps,
            scratch[part],
        )
