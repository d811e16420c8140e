"""Weights from a checkpoint's mapped file into the resident layouts.

A tensor goes through two pinned buffers in chunks of rows; the device repacks a chunk out of one scratch
buffer while the host fills the next. The scratch is no larger than a chunk, and so never holds more than
one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.layout import BLOCK_ROWS, NVFP4_EXPONENT, units
from engine.backend.cuda.linear import CudaLinear, LinearSegment
from engine.backend.cuda.segments import SegmentLayout, load_segments, rows_per_chunk
from engine.backend.cuda.staging import Staging
from engine.backend.cuda.tensor import CudaTensor
from engine.backend.protocol import DType, LinearSource, WeightFormat
from engine.memory.scope import allocation_helper

if TYPE_CHECKING:
    from cuda.core import Buffer, MemoryResource


class WeightUploader:
    """Makes linear layers resident."""

    def __init__(self, device: CudaDevice, memory: MemoryResource, staging: Staging) -> None:
        self._device = device
        self._memory = memory
        self._staging = staging

    @allocation_helper
    def load(self, parts: Sequence[LinearSource]) -> CudaLinear:
        """One linear out of parts stacked along N. Neighbours of one format become one segment."""
        loaded = load_segments(parts, partial(self._device.allocate, self._memory), self._fill)
        segments = [_segment(layout, buffer) for layout, buffer in loaded]
        return CudaLinear((sum(segment.rows for segment in segments), parts[0].shape[1]), segments)

    def _fill(self, layout: SegmentLayout, buffer: Buffer, scratch: Buffer | None) -> None:
        address, parts = int(buffer.handle), layout.parts
        if scratch is None:
            offset = address
            for part in parts:
                self._staging.upload(offset, part.weight)
                offset += part.shape[0] * part.shape[1] * 2
        else:
            self._device.clear(address, buffer.size)
            self._repack(address, int(scratch.handle), parts)
        for at, values in ((layout.scale_at, _row_scales), (layout.bias_at, _bias)):
            if at is not None:
                self._staging.upload(address + at, np.concatenate([values(part) for part in parts]))
        self._device.synchronize()

    def _repack(self, address: int, scratch: int, parts: Sequence[LinearSource]) -> None:
        row_blocks = -(-sum(part.shape[0] for part in parts) // BLOCK_ROWS)
        row = 0
        for part in parts:
            for begin, end in row_chunks(part, row):
                self._repack_rows(address, scratch, part, begin, end, row + begin, row_blocks)
            row += part.shape[0]

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


def _segment(layout: SegmentLayout, buffer: Buffer) -> LinearSegment:
    rows, is_bf16 = (layout.rows,), layout.format is WeightFormat.BF16
    shape = (layout.rows, layout.columns) if is_bf16 else (layout.weight_bytes,)
    scale, bias = (
        None if at is None else CudaTensor.of(buffer, rows, DType.FLOAT32, at)
        for at in (layout.scale_at, layout.bias_at)
    )
    return LinearSegment(
        format=layout.format,
        rows=layout.rows,
        columns=layout.columns,
        first_row=layout.first_row,
        weight=CudaTensor.of(buffer, shape, DType.BFLOAT16 if is_bf16 else DType.UINT8),
        row_scale=scale,
        bias=bias,
    )


def row_chunks(part: LinearSource, first_row: int) -> Iterator[tuple[int, int]]:
    """Rows of `part` by chunks that fit the scratch and end at row blocks of the resident matrix.

    Raises
    ------
    CheckpointError
        If not even one block of rows fits.
    """
    most = rows_per_chunk(part)
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
