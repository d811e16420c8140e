"""Rotary position embedding frequencies and their scalings."""

from __future__ import annotations

import math

import numpy as np

from engine.model.config import RopeConfig

__all__ = ["inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequencies, float32 [head_dim / 2], of a rotary embedding (Su et al. 2021, eq. 15).

    ``linear`` divides them by the factor (position interpolation, Chen et al. 2023). ``llama3`` divides
    the low ones, keeps the high ones, and blends between by wavelength (Llama 3.1's published inference
    code). ``yarn`` does so by dimension (Peng et al. 2023, section 3.2); its attention factor is
    `RopeConfig.magnitude`, which is no part of the frequencies.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        kept = _llama3_kept(rope, inv_freq)
    elif rope.rope_type == "yarn":
        kept = _yarn_kept(rope, head_dim)
    else:
        return inv_freq
    return ((1 - kept) * inv_freq / rope.factor + kept * inv_freq).astype(np.float32)


def _llama3_kept(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """The share of each frequency that is not divided: by turns over the original length."""
    wavelength = 2 * np.pi / inv_freq
    old_context = rope.original_max_position_embeddings
    smooth = (old_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return np.asarray(np.clip(smooth, 0.0, 1.0))


def _yarn_kept(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """The share of each frequency that is not divided: falls linearly with the dimension, from the one that
    turns `beta_fast` times over the original length to the one that turns `beta_slow` times.
    """

    def dimension(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low)
    return np.asarray(1 - np.clip(ramp, 0.0, 1.0))
