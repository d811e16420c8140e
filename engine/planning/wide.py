"""Tensors of a checkpoint that are not at four bits, and what they cost."""

from __future__ import annotations

import math
import re

import msgspec

from engine.backend.protocol import WeightFormat
from engine.model.checkpoint import Checkpoint
from engine.model.quantization.sources import is_same_weight, stored_format

__all__ = ["WideTensor", "WideTensors", "find_wide_tensors"]

_LAYER = re.compile(r"\.\d+\.")
_NVFP4_BITS = 4.5
"""an element and its share of the group's scale"""


class WideTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of one kind, in all layers that have them so."""

    name: str
    """the module's, with ``*`` for the layer"""
    format: str
    """``bf16``, ``fp8``"""
    count: int
    bytes: int
    """as stored"""
    over_four_bits: int
    """bytes that NVFP4 would save"""


class WideTensors(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, the costliest first."""

    tensors: list[WideTensor]
    bytes: int
    over_four_bits: int


def find_wide_tensors(checkpoint: Checkpoint) -> WideTensors:
    """Matrices that are stored in FP8 or 16 bits and more: linears and embedding tables."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, stored in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or len(stored.shape) != 2:
            continue
        if module == "lm_head" and is_same_weight(checkpoint, module, "model.embed_tokens"):
            continue  # a second copy of the table, which is not loaded
        weight_format = stored_format(checkpoint, module)
        if weight_format is not WeightFormat.NVFP4:
            kind = _LAYER.sub(".*.", module), weight_format.value
            found.setdefault(kind, []).append((stored.nbytes, math.prod(stored.shape)))
    tensors = [
        WideTensor(
            name=name,
            format=label,
            count=len(sizes),
            bytes=(nbytes := sum(size for size, _ in sizes)),
            over_four_bits=nbytes - int(sum(elements for _, elements in sizes) * _NVFP4_BITS / 8),
        )
        for (name, label), sizes in found.items()
    ]
    tensors.sort(key=lambda tensor: -tensor.over_four_bits)
    return WideTensors(
        tensors=tensors,
        bytes=sum(tensor.bytes for tensor in tensors),
        over_four_bits=sum(tensor.over_four_bits for tensor in tensors),
    )
