"""What a model is, read from a checkpoint's config.json: shapes, rotary embedding, special tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling."""

    theta: float
    rope_type: str = "default"
    """``default``, ``linear``, ``llama3`` or ``yarn``; anything else is refused when the config is read"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer."""

    architecture: str
    """first entry of ``architectures``, e.g. ``LlamaForCausalLM``"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """per layer; None attends to everything before"""
    tie_word_embeddings: bool
    """as config.json says; the tensors present decide"""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """config.json's and generation_config.json's together"""
