"""Reads single tensors with the shape and element type that they must have."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.checkpoint import Checkpoint
from engine.model.files import text_shown

__all__ = ["checked", "read_bfloat16", "read_float32", "read_scalar"]


def checked(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """View of the tensor `name` in its NumPy carrier.

    Raises
    ------
    CheckpointError
        It is missing, or of another element type or shape.
    """
    stored = checkpoint.stored(name)
    if stored.dtype != dtype:
        raise CheckpointError(
            f"{stored.file}: tensor {text_shown(name)}: expected {dtype}, found {stored.dtype}"
        )
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.file}: tensor {text_shown(name)}: expected shape {list(shape)} by config.json, "
            f"found {list(stored.shape)}"
        )
    return checkpoint.tensor(name)


def read_bfloat16(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bits of bfloat16, uint16 `shape`: a view of what is stored so, else FP16 or FP32 rounded to it."""
    stored = checkpoint.stored(name)
    if stored.dtype == "BF16":
        return checked(checkpoint, name, "BF16", shape)
    if stored.dtype not in ("F16", "F32"):
        raise UnsupportedModelError(
            f"{stored.file}: tensor {text_shown(name)}: expected BF16, F16 or F32, found {stored.dtype}"
        )
    values = checked(checkpoint, name, stored.dtype, shape)
    if not checkpoint.has_data:
        return np.broadcast_to(np.uint16(0), shape)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def read_float32(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A small tensor as float32 `shape`, whatever float it is stored in."""
    stored = checkpoint.stored(name)
    values = checked(checkpoint, name, stored.dtype, shape)
    if stored.dtype == "BF16":
        return np.asarray(values.view(ml_dtypes.bfloat16), np.float32)
    if stored.dtype in ("F16", "F32", "F64"):
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
            return np.ascontiguousarray(values, np.float32).reshape(shape)
    raise CheckpointError(f"{stored.file}: tensor {text_shown(name)}: expected a float, found {stored.dtype}")


def read_scalar(checkpoint: Checkpoint, name: str) -> float:
    """A scale of one element; 1.0 where only headers are known.

    Raises
    ------
    CheckpointError
        It is missing, or no positive number that float32 holds.
    UnsupportedModelError
        It has several elements: a scale per channel or per block.
    """
    stored = checkpoint.stored(name)
    if math.prod(stored.shape) != 1:
        raise UnsupportedModelError(
            f"{stored.file}: tensor {text_shown(name)}: expected one element (per-tensor scale), "
            f"found shape {list(stored.shape)}"
        )
    if not checkpoint.has_data:
        return 1.0
    value = float(read_float32(checkpoint, name, stored.shape).reshape(()))
    if not 0 < value < math.inf:
        raise CheckpointError(
            f"{stored.file}: tensor {text_shown(name)}: expected a positive number, found {value}"
        )
    return value
