"""What a checkpoint's configuration says of quantisation; the tensors decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.backend.protocol import WeightFormat

__all__ = ["GROUP_SIZE", "Declaration"]

GROUP_SIZE = 16
"""Elements along K that share a group scale in NVFP4."""


def _dense(module: str) -> WeightFormat:
    return WeightFormat.BF16


@dataclass(frozen=True, slots=True)
class Declaration:
    """How linears and the KV cache should be stored.

    Modules are named as in the checkpoint: patterns were written for those names.
    """

    source: str
    """the file that says so"""
    format_of: Callable[[str], WeightFormat] = _dense
    """the format of a linear, by its module name"""
    formats: frozenset[WeightFormat] = frozenset()
    """quantised formats that at least one linear should have"""
    fp8_kv_cache: bool = False
    unserved_kv_cache: str | None = None
    """a format that the KV cache is calibrated for but that is not served; the weights can be"""
