"""Reads config.json in its spellings. Every refusal names the file and the field.

``dtype`` (once ``torch_dtype``) is not read: every tensor says what it is stored in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.config import ModelConfig
from engine.model.files import shown
from engine.model.json_fields import Fields
from engine.model.read_rope import read_rope

__all__ = ["read_model_config"]

_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def read_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelConfig:
    """The model of config.json (`raw`) and generation_config.json (`generation`, may be empty).

    Parameters
    ----------
    source
        The path of config.json, for errors. What is absent has the value that transformers gives it.

    Raises
    ------
    CheckpointError
        A field is missing or absurd.
    UnsupportedModelError
        The activation function, the rotary embedding or a kind of layer is not served.
    """
    fields = Fields(raw, source)
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise fields.fault("architectures", "a list of names")
    architecture: str = architectures[0]
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{source}: hidden_act: {shown(activation)} is not served; expected silu")

    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads: {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    layers = fields.count("num_hidden_layers")
    rope = read_rope(fields, source)
    positions = fields.count("max_position_embeddings")
    if rope.rope_type == "yarn":
        # Some config.json give the length before it is extended, some the one after.
        original = rope.original_max_position_embeddings or positions
        rope = replace(rope, original_max_position_embeddings=original)
        positions = max(positions, min(int(original * rope.factor), (1 << 31) - 1))
    tied = fields.get("tie_word_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, architecture, hidden, heads, source),
        max_position_embeddings=positions,
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_windows=_sliding_windows(fields, architecture, layers, source),
        tie_word_embeddings=None if tied is None else fields.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_tokens(
            fields, Fields(generation, f"{source.removesuffix('config.json')}generation_config.json")
        ),
        biased=_biased(fields, architecture),
    )


def _head_dim(fields: Fields, architecture: str, hidden: int, heads: int, source: str) -> int:
    """It is not always hidden / heads: read when present. Qwen3's standard is 128 whatever the shapes are."""
    if fields.get("head_dim") is None and architecture != "Qwen3ForCausalLM":
        if hidden % heads:
            raise CheckpointError(
                f"{source}: head_dim: expected it, as hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {heads}"
            )
        head_dim = hidden // heads
    else:
        head_dim = fields.count("head_dim", 128)
    if head_dim % 2:
        raise CheckpointError(f"{source}: head_dim: {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _sliding_windows(fields: Fields, architecture: str, layers: int, source: str) -> tuple[int | None, ...]:
    """Per layer. Llama has none. Mistral slides on every layer, over 4,096 tokens when the field is absent
    and not at all when it is null. Qwen slides where ``use_sliding_window`` and the layer's kind say so.
    """
    if architecture == "MistralForCausalLM":
        if "sliding_window" in fields.raw and fields.get("sliding_window") is None:
            return (None,) * layers
        return (fields.count("sliding_window", 4096),) * layers
    if architecture not in _QWEN or not fields.flag("use_sliding_window", False):
        return (None,) * layers
    if "sliding_window" in fields.raw and fields.get("sliding_window") is None:
        return (None,) * layers
    window = fields.count("sliding_window", 4096)
    if fields.get("layer_types") is None:
        first = fields.get("max_window_layers")
        if first is None:
            first = 28
        if not isinstance(first, int) or isinstance(first, bool):
            raise fields.fault("max_window_layers", "an integer")
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = fields.names("layer_types")
    if len(kinds) != layers:
        raise fields.fault("layer_types", f"a list of {layers} names, as many as num_hidden_layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{source}: layer_types: {shown(kind)} is not served")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _biased(fields: Fields, architecture: str) -> frozenset[str]:
    """Qwen2 has a bias on q, k and v, which is not in its configuration."""
    if architecture == "Qwen2ForCausalLM":
        return frozenset(_ATTENTION[:3])
    attention = _ATTENTION if fields.flag("attention_bias", False) else ()
    mlp = _MLP if fields.flag("mlp_bias", False) else ()
    return frozenset(attention + mlp)


def _eos_tokens(*both: Fields) -> tuple[int, ...]:
    """One or a list in either file; each may know of some that the other does not."""
    tokens: set[int] = set()
    for fields in both:
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise fields.fault("eos_token_id", "a token id or a list of them")
        tokens.update(ids)
    return tuple(sorted(tokens))
