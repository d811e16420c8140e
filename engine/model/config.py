"""What a model is: shapes, rotary embedding, special tokens. `engine.model.read_config` reads it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling."""

    theta: float
    rope_type: str = "default"
    """``default``, ``linear``, ``llama3`` or ``yarn``; anything else is refused when the config is read"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3"""
    high_freq_factor: float = 4.0
    """llama3"""
    original_max_position_embeddings: int = 0
    """llama3 and yarn: the length that the model was trained at"""
    beta_fast: float = 32.0
    """yarn: what turns more often than this over the original length keeps its frequency"""
    beta_slow: float = 1.0
    """yarn: what turns less often than this is divided by the factor"""
    truncate: bool = True
    """yarn: whether the range between the two is widened to whole dimensions"""
    magnitude: float = 1.0
    """multiplies cos and sin (yarn's attention factor)"""


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
    """the longest sequence; with yarn, what it extends the original length to"""
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """per layer; None attends to everything before"""
    tie_word_embeddings: bool | None
    """as config.json says, None where it does not; the tensors present decide"""
    eos_token_ids: tuple[int, ...]
    """config.json's and generation_config.json's together"""
    biased: frozenset[str] = frozenset()
    """the linears (``q_proj`` …) that have a bias by the architecture or config.json; others may have one"""
