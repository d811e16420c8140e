"""Reads the rotary embedding of config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math

from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.config import RopeConfig
from engine.model.files import shown
from engine.model.json_fields import Fields

__all__ = ["read_rope"]

_TYPES = ("default", "linear", "llama3", "yarn")
_STANDARD_THETA = 10000.0
"""transformers', where config.json gives none (Llama 1)"""


def read_rope(config: Fields, source: str) -> RopeConfig:
    """``rope_parameters`` (transformers 5), else ``rope_theta`` and ``rope_scaling`` with ``type`` or
    ``rope_type``.

    Raises
    ------
    CheckpointError
        A number is missing or absurd.
    UnsupportedModelError
        The type is unknown, or the embedding differs between layers or turns a part of a head only.
    """
    scaling = _parameters(config, source)
    for fields in (config, scaling):
        share = fields.get("partial_rotary_factor")
        if share is not None and share != 1:
            raise UnsupportedModelError(
                f"{source}: partial_rotary_factor: {shown(share)} is not served; expected 1"
            )
    kind = scaling.get("rope_type")
    if kind is None:
        kind = scaling.get("type")
    if kind is None:
        kind = "default"
    if kind not in _TYPES:
        raise UnsupportedModelError(
            f"{source}: rope_type: {shown(kind)} is not served; expected one of {', '.join(_TYPES)}"
        )
    theta = scaling.positive("rope_theta", config.positive("rope_theta", _STANDARD_THETA))
    if theta <= 1:
        raise CheckpointError(f"{source}: rope_theta: expected more than 1, found {shown(theta)}")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=scaling.positive("factor"))
    if kind == "llama3":
        return _llama3(theta, scaling)
    return _yarn(theta, config, scaling)


def _llama3(theta: float, scaling: Fields) -> RopeConfig:
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if low >= high:
        raise scaling.fault("low_freq_factor", f"less than high_freq_factor {high}")
    return RopeConfig(
        theta,
        "llama3",
        factor=scaling.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=scaling.count("original_max_position_embeddings"),
    )


def _yarn(theta: float, config: Fields, scaling: Fields) -> RopeConfig:
    """The attention factor is Peng et al. 2023, eq. 22, or by ``mscale`` and ``mscale_all_dim``."""
    original = 0
    if scaling.get("original_max_position_embeddings") is not None:
        original = scaling.count("original_max_position_embeddings")
    if scaling.get("factor") is None and original:
        factor = config.count("max_position_embeddings") / original
    else:
        factor = scaling.positive("factor")

    def magnitude(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        attention_factor = scaling.positive("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = magnitude(scaling.positive("mscale")) / magnitude(
            scaling.positive("mscale_all_dim")
        )
    else:
        attention_factor = magnitude(1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        magnitude=attention_factor,
    )


def _parameters(config: Fields, source: str) -> Fields:
    """The object with the numbers. Where it is nested by layer type, all of them must be the same."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = config.object(name)
        if parameters is None or not parameters.raw:
            continue
        nested = [value for value in parameters.raw.values() if isinstance(value, dict)]
        if len(nested) != len(parameters.raw):
            return parameters
        if any(value != nested[0] for value in nested):
            raise UnsupportedModelError(f"{source}: {name}: layers of different embeddings are not served")
        first = parameters.object(next(iter(parameters.raw)))
        assert first is not None, "it is a dict"
        return first
    return Fields({}, source)
