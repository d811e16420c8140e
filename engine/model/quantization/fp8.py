"""FP8 with one scale for the tensor: E4M3 elements and ``weight_scale`` to multiply by, in both formats."""

from __future__ import annotations

import numpy as np

from engine.backend.protocol import LinearSource, WeightFormat
from engine.model.checkpoint import Checkpoint
from engine.model.quantization.tensors import checked, read_scalar

__all__ = ["is_stored", "read"]


def is_stored(checkpoint: Checkpoint, module: str) -> bool:
    """Whether `module` is stored in E4M3."""
    name = f"{module}.weight"
    return name in checkpoint and checkpoint.stored(name).dtype == "F8_E4M3"


def read(
    checkpoint: Checkpoint, module: str, shape: tuple[int, int], bias: np.ndarray | None
) -> LinearSource:
    """The linear `module`, which is stored in FP8.

    Raises
    ------
    CheckpointError
        A tensor is missing, contradicts `shape`, or holds no scale.
    UnsupportedModelError
        It has scales per channel or per block.
    """
    weight = checked(checkpoint, f"{module}.weight", "F8_E4M3", shape)
    scale = read_scalar(checkpoint, f"{module}.weight_scale")
    return LinearSource(module, WeightFormat.FP8, shape, weight, None, scale, bias)
