"""Qwen2 (Yang et al. 2024): Llama with a bias on q, k and v, which config.json does not mention."""

from __future__ import annotations

from engine.model.llama import Llama


class Qwen2(Llama):
    """The loader takes a linear layer's bias where the checkpoint has one; nothing else differs."""
