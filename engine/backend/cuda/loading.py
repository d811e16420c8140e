"""Weights from a checkpoint's mapped file into the resident layouts.

A tensor goes through two pinned buffers in chunks of rows; the device repacks a chunk out of one scratch
buffer while the host fills the next. The scratch is no larger than a chunk, and so never holds more than
one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.layout import BLOCK_ROWS, LAYOUTS, NVFP4_EXPONENT, units
from engine.backend.cuda.linear import CudaLinear, LinearSegment
from engine.backend.cuda.staging import CHUNK_BYTES, Staging
from engine.backend.cuda.tensor import CudaTensor, aligned
from engine.backend.protocol import DType, LinearSource, WeightFormat
from engine.errors import CheckpointError
from engine.memory.scope import allocation_helper, current_tag, memory_scope

if TYPE_CHECKING:
    from cuda.core import Buffer, MemoryResource

_MOST_GRID_ROWS = 65535
"""A grid's second dimension; no chunk has so many row blocks."""


class WeightUploader:
    """Makes linear layers resident."""

    def __init__(self, device: CudaDevice, memory: MemoryResource, staging: Staging) -> None:
        self._device = device
        self._memory = memory
        self._staging = staging

    @allocation_helper
    def load(self, parts: Sequence[LinearSource]) -> CudaLinear:
        """One linear out of parts stacked along N. Neighbours of one format become one segment."""
        columns = parts[0].shape[1]
        for part in parts:
            _check(part, columns)
        segments: list[LinearSegment] = []
        try:
            first_row = 0
            for _, group in groupby(parts, key=lambda part: part.format):
                segment = self._segment(list(group), first_row)
                segments.append(segment)
                first_row += segment.rows
        except BaseException:
            for segment in segments:
                segment.weight.buffer.close()
            raise
        return CudaLinear((first_row, columns), segments)

    @allocation_helper
    def _segment(self, parts: list[LinearSource], first_row: int) -> LinearSegment:
        """Weights, row scales and bias in one buffer, in this order."""
        format, columns = parts[0].format, parts[0].shape[1]
        rows = sum(part.shape[0] for part in parts)
        layout = LAYOUTS[format]
        weight_bytes = layout.nbytes(rows, columns)
        has_scale = format is not WeightFormat.BF16
        has_bias = any(part.bias is not None for part in parts)
        scale_at = aligned(weight_bytes)
        bias_at = scale_at + (aligned(rows * 4) if has_scale else 0)
        size = bias_at + rows * 4 if has_bias else scale_at + rows * 4 if has_scale else weight_bytes
        buffer = self._device.allocate(self._memory, size)
        try:
            self._fill(buffer, parts, scale_at if has_scale else None, bias_at if has_bias else None)
        except BaseException:
            buffer.close()  # the traceback would keep it alive
            raise
        shape = (rows, columns) if format is WeightFormat.BF16 else (weight_bytes,)
        dtype = DType.BFLOAT16 if format is WeightFormat.BF16 else DType.UINT8
        return LinearSegment(
            format=format,
            rows=rows,
            columns=columns,
            first_row=first_row,
            weight=CudaTensor.of(buffer, shape, dtype),
            row_scale=CudaTensor.of(buffer, (rows,), DType.FLOAT32, scale_at) if has_scale else None,
            bias=CudaTensor.of(buffer, (rows,), DType.FLOAT32, bias_at) if has_bias else None,
        )

    def _fill(
        self, buffer: Buffer, parts: list[LinearSource], scale_at: int | None, bias_at: int | None
    ) -> None:
        address = int(buffer.handle)
        format = parts[0].format
        if format is WeightFormat.BF16:
            offset = address
            for part in parts:
                self._staging.upload(offset, part.weight)
                offset += part.shape[0] * part.shape[1] * 2
        else:
            self._device.clear(address, buffer.size)
            self._repack(address, parts)
        if scale_at is not None:
            self._staging.upload(address + scale_at, np.concatenate([_row_scales(part) for part in parts]))
        if bias_at is not None:
            self._staging.upload(address + bias_at, np.concatenate([_bias(part) for part in parts]))
        self._device.synchronize()

    @allocation_helper
    def _repack(self, address: int, parts: list[LinearSource]) -> None:
        tag = current_tag()
        largest = max(bytes_of_rows(part, part.shape[0]) for part in parts)
        with memory_scope(f"repack/{tag.partition('/')[2] or tag}"):
            scratch = self._device.allocate(self._memory, min(largest, CHUNK_BYTES))
        row_blocks = -(-sum(part.shape[0] for part in parts) // BLOCK_ROWS)
        try:
            row = 0
            for part in parts:
                for begin, end in row_chunks(part, row):
                    self._repack_rows(address, int(scratch.handle), part, begin, end, row + begin, row_blocks)
                row += part.shape[0]
            self._device.synchronize()
        finally:
            scratch.close()

    def _repack_rows(
        self,
        address: int,
        scratch: int,
        part: LinearSource,
        begin: int,
        end: int,
        first_row: int,
        row_blocks: int,
    ) -> None:
        columns = part.shape[1]
        blocks = (first_row + end - begin - 1) // BLOCK_ROWS - first_row // BLOCK_ROWS + 1
        sources = [np.ascontiguousarray(part.weight[begin:end])]
        if part.format is WeightFormat.NVFP4:
            assert part.group_scales is not None
            sources.append(np.ascontiguousarray(part.group_scales[begin:end]))
        addresses = self._staging.upload_together(scratch, sources)
        kernel = self._device.kernel("repack", f"repack_{part.format.value}")
        grid = (units(columns), blocks)
        arguments = (*addresses, address, first_row, end - begin, columns, units(columns), row_blocks)
        self._device.launch(kernel, grid, 256, *arguments, overlap=False)


def bytes_of_rows(part: LinearSource, rows: int) -> int:
    """Bytes of a checkpoint's rows, group scales included."""
    columns = part.shape[1]
    return rows * (columns // 2 + columns // 16 if part.format is WeightFormat.NVFP4 else columns)


def row_chunks(part: LinearSource, first_row: int) -> Iterator[tuple[int, int]]:
    """Rows of `part` by chunks that fit the scratch and end at row blocks of the resident matrix.

    Raises
    ------
    CheckpointError
        If not even one block of rows fits.
    """
    most = CHUNK_BYTES // bytes_of_rows(part, 1)
    if most < BLOCK_ROWS:
        raise CheckpointError(f"{part.name}: {part.shape[1]} columns are more than the CUDA backend repacks")
    most = min(most // BLOCK_ROWS, _MOST_GRID_ROWS - 1) * BLOCK_ROWS
    begin, rows = 0, part.shape[0]
    while begin < rows:
        end = min(rows, begin + most - (first_row + begin) % BLOCK_ROWS)
        yield begin, end
        begin = end


def _row_scales(part: LinearSource) -> np.ndarray:
    scale = part.global_scale * (2.0**NVFP4_EXPONENT if part.format is WeightFormat.NVFP4 else 1.0)
    return np.full(part.shape[0], scale, np.float32)


def _bias(part: LinearSource) -> np.ndarray:
    return (
        np.zeros(part.shape[0], np.float32) if part.bias is None else part.bias.astype(np.float32, copy=False)
    )


def _check(part: LinearSource, columns: int) -> None:
    if part.shape[1] != columns:
        raise CheckpointError(f"{part.name}: {part.shape[1]} columns, its neighbours have {columns}")
    if part.format is WeightFormat.NVFP4 and columns % 16:
        raise CheckpointError(f"{part.name}: NVFP4 needs columns in groups of 16, not {columns}")
