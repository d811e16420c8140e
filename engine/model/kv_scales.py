"""Scales of an FP8 KV cache, one for the keys and one for the values of each layer."""

from __future__ import annotations

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.tensors import read_scalar

__all__ = ["is_kv_scale", "read_kv_scales"]

_SPELLINGS = ("{0}_proj.{0}_scale", "{0}_scale")
"""below ``self_attn``: ModelOpt's, then compressed-tensors'"""


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale of the KV cache."""
    return name.endswith((".k_scale", ".v_scale"))


def read_kv_scales(checkpoint: Checkpoint) -> list[tuple[float, float]]:
    """(key scale, value scale) of every layer: a stored element times its scale is the value.

    One present serves both. Where a layer has none it is 1.0, with one warning for the model.

    Raises
    ------
    CheckpointError
        A scale is no positive number, or (UnsupportedModelError) has several elements.
    """
    scales, without, count = [], [], 0
    for layer in range(checkpoint.config.num_layers):
        found = {which: scale for which in "kv" if (scale := _read(checkpoint, layer, which)) is not None}
        count += len(found)
        if not found:
            without.append(layer)
        key = found.get("k", found.get("v", 1.0))
        scales.append((key, found.get("v", key)))
    if without:
        layers = "every layer" if not count else f"layers {', '.join(map(str, without))}"
        checkpoint.log.warning(
            "%s: no scales for an FP8 KV cache; 1.0 is used for %s", checkpoint.path, layers
        )
    if count:
        checkpoint.log.info("%s: %d scales of the FP8 KV cache were loaded", checkpoint.path, count)
    return scales


def _read(checkpoint: Checkpoint, layer: int, which: str) -> float | None:
    for spelling in _SPELLINGS:
        name = f"model.layers.{layer}.self_attn.{spelling.format(which)}"
        if name in checkpoint:
            return read_scalar(checkpoint, name)
    return None
