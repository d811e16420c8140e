"""`LinearSource`s out of a checkpoint, in ModelOpt's and compressed-tensors' conventions.

The tensors that are present decide the format. ModelOpt stores a global scale to multiply by
(``weight_scale_2`` = amax / 2688), compressed-tensors one to divide by (``weight_global_scale``).
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from engine.backend.protocol import LinearSource, WeightFormat
from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.checkpoint import Checkpoint

__all__ = ["has_linear", "linear_source", "linear_tensors", "read_float32", "read_scalar"]

_GROUP = 16
_SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "bias",
)


def has_linear(checkpoint: Checkpoint, module: str) -> bool:
    """Whether the checkpoint holds a weight of `module`, in any format."""
    return f"{module}.weight" in checkpoint or f"{module}.weight_packed" in checkpoint


def linear_tensors(checkpoint: Checkpoint, module: str) -> list[str]:
    """The names of the tensors that make up the linear layer `module`."""
    return [name for suffix in _SUFFIXES if (name := f"{module}.{suffix}") in checkpoint]


def linear_source(checkpoint: Checkpoint, module: str, rows: int, cols: int) -> LinearSource:
    """The linear layer `module`, [rows, cols].

    Raises
    ------
    CheckpointError
        A tensor is missing, or its shape or element type contradicts config.json.
    UnsupportedModelError
        It is stored in a format that is not served.
    """
    bias_name = f"{module}.bias"
    bias = read_float32(checkpoint, bias_name, (rows,)) if bias_name in checkpoint else None
    packed = f"{module}.weight_packed" in checkpoint
    weight = f"{module}.weight_packed" if packed else f"{module}.weight"
    kind = checkpoint.stored(weight).dtype

    if kind == "U8":
        if cols % _GROUP:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {weight}: {cols} columns; NVFP4 needs a multiple of {_GROUP}"
            )
        global_name = f"{module}.weight_global_scale" if packed else f"{module}.weight_scale_2"
        scale = read_scalar(checkpoint, global_name)
        return LinearSource(
            module,
            WeightFormat.NVFP4,
            (rows, cols),
            _checked(checkpoint, weight, "U8", (rows, cols // 2)),
            _checked(checkpoint, f"{module}.weight_scale", "F8_E4M3", (rows, cols // _GROUP)).view(np.uint8),
            1.0 / scale if packed else scale,
            bias,
        )
    if kind == "F8_E4M3":
        codes = _checked(checkpoint, weight, "F8_E4M3", (rows, cols))
        scale = read_scalar(checkpoint, f"{module}.weight_scale")
        return LinearSource(module, WeightFormat.FP8, (rows, cols), codes, None, scale, bias)
    return LinearSource(
        module, WeightFormat.BF16, (rows, cols), read_bfloat16(checkpoint, weight, (rows, cols)), bias=bias
    )


def read_bfloat16(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """bfloat16 bits, uint16. FP16 and FP32 tensors are rounded to it."""
    kind = checkpoint.stored(name).dtype
    if kind == "BF16":
        return _checked(checkpoint, name, "BF16", shape)
    if kind not in ("F16", "F32"):
        raise UnsupportedModelError(f"{checkpoint.path}: tensor {name}: {kind} weights are not served")
    return _checked(checkpoint, name, kind, shape).astype(ml_dtypes.bfloat16).view(np.uint16)


def read_float32(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A small tensor as float32."""
    kind = checkpoint.stored(name).dtype
    values = _checked(checkpoint, name, kind, shape)
    if kind == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if kind in ("F16", "F32", "F64"):
        return np.ascontiguousarray(values, np.float32)
    raise CheckpointError(f"{checkpoint.path}: tensor {name}: expected a float, found {kind}")


def read_scalar(checkpoint: Checkpoint, name: str) -> float:
    """A scale of one element. Raises CheckpointError if it is missing, or no positive number."""
    stored = checkpoint.stored(name)
    if math.prod(stored.shape) != 1:
        raise UnsupportedModelError(
            f"{stored.file}: tensor {name}: expected one element, found shape {list(stored.shape)}"
        )
    value = float(read_float32(checkpoint, name, stored.shape).reshape(()))
    if not 0 < value < math.inf:
        raise CheckpointError(f"{stored.file}: tensor {name}: expected a positive number, found {value}")
    return value


def _checked(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    stored = checkpoint.stored(name)
    if stored.dtype != dtype:
        raise CheckpointError(f"{stored.file}: tensor {name}: expected {dtype}, found {stored.dtype}")
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.file}: tensor {name}: expected shape {list(shape)} by config.json, "
            f"found {list(stored.shape)}"
        )
    return checkpoint.tensor(name)
