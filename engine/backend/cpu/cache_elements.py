"""Elements of the paged cache, in whichever type it keeps them: E4M3, bfloat16 or float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.backend.cpu.floats import decode_bf16, decode_e4m3, encode_bf16, encode_e4m3

__all__ = ["decode_element", "store_row"]


def decode_element(element: np.generic) -> np.float32:
    """The float32 of a cache's element. E4M3's scale is left to the caller."""
    raise TypeError("only for compiled kernels")


def store_row(values: np.ndarray, scale: np.float32, row: np.ndarray) -> None:
    """Write float32 `values` [D] to a cache's `row` [D]: in E4M3 divided by `scale`, else not."""
    raise TypeError("only for compiled kernels")


@overload(decode_element, strict=False)
def _decode_element(element: Any) -> Any:
    if element == types.uint8:
        return lambda element: decode_e4m3(element)
    if element == types.uint16:
        return lambda element: decode_bf16(element)
    return lambda element: element


@overload(store_row, jit_options={"error_model": "numpy"}, strict=False)
def _store_row(values: Any, scale: Any, row: Any) -> Any:
    if row.dtype == types.uint8:

        def store(values: Any, scale: Any, row: Any) -> None:
            for i in range(row.size):
                row[i] = encode_e4m3(values[i] / scale)

    elif row.dtype == types.uint16:

        def store(values: Any, scale: Any, row: Any) -> None:
            for i in range(row.size):
                row[i] = encode_bf16(values[i])

    else:

        def store(values: Any, scale: Any, row: Any) -> None:
            for i in range(row.size):
                row[i] = values[i]

    return store
