"""Rotary position embedding frequencies and their scalings."""

from __future__ import annotations

import numpy as np

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequencies, float32 [head_dim / 2], of a rotary embedding (Su et al. 2021, eq. 15).

    ``linear`` divides them by the factor (position interpolation, Chen et al. 2023). ``llama3`` divides
    the low ones, keeps the high ones, and blends between by wavelength (Llama 3.1's published inference
    code).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        wavelength = 2 * np.pi / inv_freq
        old_context = rope.original_max_position_embeddings
        smooth = (old_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * inv_freq / rope.factor + smooth * inv_freq).astype(np.float32)
    return inv_freq
