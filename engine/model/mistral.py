"""Mistral (Jiang et al. 2023): Llama whose attention may slide over a window
(`ModelConfig.sliding_windows`).
"""

from __future__ import annotations

from engine.model.llama import Llama


class Mistral(Llama):
    """Every difference from Llama is in the configuration."""
