"""One safetensors file: which tensors it holds, and its bytes mapped into memory."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError, UnsupportedModelError
from engine.model.files import text_shown

__all__ = ["MappedFile", "StoredTensor", "carrier_of", "list_tensors"]

_MOST_DIMENSIONS = 64
"""of a NumPy array"""

_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of an element, by safetensors' name of its type."""

_CARRIERS: dict[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "U8": np.uint8,
}
"""NumPy carriers of the element types that are read; bfloat16 and E4M3 travel as unsigned integers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """safetensors' name: ``BF16``, ``F8_E4M3``, ``U8`` …"""
    shape: tuple[int, ...]
    start: int
    """byte offset in the file"""
    nbytes: int


def list_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of `file` by name; no data is read.

    The safetensors library reads and checks the header: its length, its JSON, that every tensor has as many
    bytes as its shape takes, and that the tensors cover the file without holes or overlap. So offsets follow:
    tensors lie one after the other, in the order of ``offset_keys``.

    Raises
    ------
    CheckpointError
        It is missing, or no sound safetensors file; or a tensor has more dimensions than an array can have.
    UnsupportedModelError
        An element type is unknown.
    """
    tensors = {}
    try:
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        with safe_open(file, framework="np") as opened:
            start = 8 + header
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
                if dtype not in _BITS:
                    raise UnsupportedModelError(
                        f"{file}: tensor {text_shown(name)}: element type {dtype} is not served"
                    )
                if len(shape) > _MOST_DIMENSIONS:
                    raise CheckpointError(
                        f"{file}: tensor {text_shown(name)}: expected at most {_MOST_DIMENSIONS} dimensions, "
                        f"found {len(shape)}"
                    )
                nbytes = math.prod(shape) * _BITS[dtype] // 8
                tensors[name] = StoredTensor(file, dtype, shape, start, nbytes)
                start += nbytes
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a sound safetensors file: {text_shown(str(error))}") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or text_shown(str(error))}") from None
    return tensors


def carrier_of(dtype: str) -> type[np.generic] | None:
    """The NumPy type that elements of safetensors' `dtype` are read as; None: they are not read."""
    return _CARRIERS.get(dtype)


class MappedFile:
    """A file's bytes, mapped: pages come in when a tensor is read, and go when it is released."""

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be mapped: {error}") from None

    def view(self, name: str, stored: StoredTensor) -> np.ndarray:
        """Read-only view in the element type's NumPy carrier; a copy where the file does not align it.

        Raises
        ------
        UnsupportedModelError
            No tensor of this element type is read.
        """
        carrier = carrier_of(stored.dtype)
        if carrier is None:
            raise UnsupportedModelError(
                f"{stored.file}: tensor {text_shown(name)}: element type {stored.dtype} is not served"
            )
        count = math.prod(stored.shape)
        if count == 0:
            return np.empty(stored.shape, carrier)
        array = np.frombuffer(self._map, carrier, count, stored.start)
        # Compiled kernels take aligned arrays only. Writers align tensors; the format does not ask for it.
        return (array if array.flags.aligned else array.copy()).reshape(stored.shape)

    def release(self, stored: StoredTensor) -> None:
        """Let the system drop the pages of a tensor. What is still read of them comes back from the file."""
        if stored.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            # Pages shared with a neighbour go too: it may have been read long ago, and nothing is lost.
            start = stored.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, stored.start + stored.nbytes - start)
