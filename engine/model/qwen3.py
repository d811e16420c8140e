"""Qwen3 (Yang et al. 2025): Llama with an RMS norm per head on q and k before RoPE."""

from __future__ import annotations

from engine.model.llama import Llama


class Qwen3(Llama):
    """Differs from Llama by the norms on q and k."""

    qk_norm = True
