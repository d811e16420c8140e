"""Reads config.json in its spellings. Every refusal names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.config import ModelConfig, RopeConfig

__all__ = ["read_model_config"]

_ROPE_TYPES = ("default", "linear", "llama3")


def read_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelConfig:
    """The model of config.json (`raw`) and generation_config.json (`generation`, may be empty).

    Raises
    ------
    CheckpointError
        A field is missing or absurd.
    UnsupportedModelError
        The activation function or the rope type is not served.
    """
    fields = _Fields(raw, source)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{source}: architectures: expected a list of names, found {architectures!r}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{source}: hidden_act: {activation!r} is not served; expected silu")

    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads: {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = fields.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{source}: head_dim: {head_dim} is odd; rotary embedding needs pairs")
    layers = fields.count("num_hidden_layers")
    eos = _token_ids(raw, source) | _token_ids(generation, source)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=_rope(raw, source),
        sliding_windows=_sliding_windows(raw, fields, architectures[0], layers),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=raw.get("bos_token_id") if isinstance(raw.get("bos_token_id"), int) else None,
        eos_token_ids=tuple(sorted(eos)),
    )


class _Fields:
    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def count(self, name: str, standard: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            value = standard
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self.source}: {name}: expected a positive integer, found {value!r}")
        return value

    def positive(self, name: str, standard: float) -> float:
        return _positive(self.raw.get(name, standard), f"{self.source}: {name}")


def _positive(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where}: expected a positive number, found {value!r}")
    return float(value)


def _rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    """transformers 5 writes rope_parameters; before, rope_theta and rope_scaling, with type or rope_type."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{source}: rope_parameters: expected an object, found {rope!r}")
    nested = rope.get("full_attention")
    if isinstance(nested, dict):
        rope = nested
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"{source}: rope_type: {rope_type!r} is not served; expected one of {', '.join(_ROPE_TYPES)}"
        )

    def number(name: str, standard: float | None = None) -> float:
        return _positive(rope.get(name, standard), f"{source}: rope_parameters.{name}")

    theta = _positive(rope.get("rope_theta", raw.get("rope_theta", 10000.0)), f"{source}: rope_theta")
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor=number("factor"))
    return RopeConfig(
        theta,
        rope_type,
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_position_embeddings=int(number("original_max_position_embeddings")),
    )


def _sliding_windows(
    raw: Mapping[str, Any], fields: _Fields, architecture: str, layers: int
) -> tuple[int | None, ...]:
    """Per layer. Absent and null both mean none here; Qwen's counts only with use_sliding_window."""
    if raw.get("sliding_window") is None or not raw.get(
        "use_sliding_window", not architecture.startswith("Qwen")
    ):
        return (None,) * layers
    window = fields.count("sliding_window")
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise CheckpointError(f"{fields.source}: layer_types: expected a list of {layers} names")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = fields.raw.get("max_window_layers", 0) if architecture.startswith("Qwen") else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def _token_ids(raw: Mapping[str, Any], source: str) -> set[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise CheckpointError(f"{source}: eos_token_id: expected token ids, found {value!r}")
    return set(ids)
