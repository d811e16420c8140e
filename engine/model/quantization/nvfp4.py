"""NVFP4: E2M1 codes in groups of 16 along K, an E4M3 scale for each group and an FP32 scale for the tensor.

ModelOpt stores a global scale to multiply by (``weight_scale_2`` = amax / 2688), compressed-tensors one to
divide by (``weight_global_scale`` = 2688 / amax). Both store codes and scales
row-major, the even element in the low nibble.
"""

from __future__ import annotations

import numpy as np

from engine.backend.protocol import LinearSource, WeightFormat
from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.checkpoint import Checkpoint
from engine.model.quantization.declaration import GROUP_SIZE
from engine.model.quantization.tensors import checked, read_scalar

__all__ = ["codes_name", "read"]

_LARGEST_SCALE = 0x7E
"""448 in E4M3; above are NaN and what is negative"""


def codes_name(checkpoint: Checkpoint, module: str) -> str | None:
    """The name of the packed codes of `module` if it is stored in NVFP4."""
    packed, weight = f"{module}.weight_packed", f"{module}.weight"
    if packed in checkpoint:
        return packed
    if weight in checkpoint and checkpoint.stored(weight).dtype == "U8":
        return weight
    return None


def read(
    checkpoint: Checkpoint, module: str, shape: tuple[int, int], bias: np.ndarray | None
) -> LinearSource:
    """The linear `module`, which is stored in NVFP4.

    Raises
    ------
    CheckpointError
        A tensor is missing, contradicts `shape`, or holds no scale.
    UnsupportedModelError
        K is no multiple of 16.
    """
    rows, cols = shape
    codes = codes_name(checkpoint, module)
    assert codes is not None, "the caller has found it"
    if cols % GROUP_SIZE:
        raise UnsupportedModelError(
            f"{checkpoint.path}: tensor {codes}: {cols} columns; NVFP4 needs a multiple of {GROUP_SIZE}"
        )
    weight = checked(checkpoint, codes, "U8", (rows, cols // 2))
    group_scales = checked(checkpoint, f"{module}.weight_scale", "F8_E4M3", (rows, cols // GROUP_SIZE))
    if checkpoint.has_data and int(group_scales.max(initial=0)) > _LARGEST_SCALE:
        raise CheckpointError(
            f"{checkpoint.stored(codes).file}: tensor {module}.weight_scale: "
            "expected numbers from 0 to 448, found NaN or a negative number"
        )
    return LinearSource(
        module,
        WeightFormat.NVFP4,
        shape,
        weight,
        group_scales,
        _global_scale(checkpoint, module, codes),
        bias,
    )


def _global_scale(checkpoint: Checkpoint, module: str, codes: str) -> float:
    """A multiplier, whoever wrote it."""
    if not codes.endswith("_packed"):
        return read_scalar(checkpoint, f"{module}.weight_scale_2")
    name = f"{module}.weight_global_scale"
    multiplier = 1.0 / read_scalar(checkpoint, name)
    if multiplier > float(np.finfo(np.float32).max):
        raise CheckpointError(
            f"{checkpoint.stored(name).file}: tensor {name}: expected a number with a reciprocal in float32"
        )
    return float(np.float32(multiplier))
