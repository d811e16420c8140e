"""What linear layers ask device memory for, in which order: for the backend, and for plans of it.

A segment is a run of rows that share a format. It lies in one buffer: weights, row scales, bias. A segment
that is repacked has a scratch buffer beside it while that lasts, no larger than a chunk of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from engine.backend.cuda.layout import BLOCK_ROWS, LAYOUTS
from engine.backend.cuda.staging import CHUNK_BYTES
from engine.backend.cuda.tensor import aligned
from engine.backend.protocol import LinearSource, WeightFormat
from engine.errors import CheckpointError
from engine.memory.scope import allocation_helper, current_tag, memory_scope

if TYPE_CHECKING:
    from cuda.core import Buffer

__all__ = ["SegmentLayout", "bytes_of_rows", "load_segments", "rows_per_chunk", "segment_layouts"]

_MOST_GRID_ROWS = 65535
"""A grid's second dimension; no chunk has so many row blocks."""

Allocate = Callable[[int], "Buffer"]
Fill = Callable[["SegmentLayout", "Buffer", "Buffer | None"], None]
"""Puts a segment's weights into its buffer, by way of the scratch if there is one"""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLayout:
    """Where in its buffer what of a segment lies. Offsets and sizes are bytes."""

    parts: tuple[LinearSource, ...]
    format: WeightFormat
    rows: int
    columns: int
    first_row: int
    """in the layer"""
    weight_bytes: int
    scale_at: int | None
    bias_at: int | None
    nbytes: int
    scratch_bytes: int
    """0: weights go to their place as they are"""

    @classmethod
    def of(cls, parts: Sequence[LinearSource], first_row: int) -> SegmentLayout:
        """The layout of `parts` below each other.

        Raises
        ------
        CheckpointError
            A part has more columns than can be repacked.
        """
        weight_format, columns = parts[0].format, parts[0].shape[1]
        rows = sum(part.shape[0] for part in parts)
        end = weight_bytes = LAYOUTS[weight_format].nbytes(rows, columns)
        scale_at = bias_at = None
        scratch = 0
        if weight_format is not WeightFormat.BF16:
            scale_at = aligned(end)
            end = scale_at + rows * 4
            for part in parts:
                rows_per_chunk(part)
            scratch = min(max(bytes_of_rows(part, part.shape[0]) for part in parts), CHUNK_BYTES)
        if any(part.bias is not None for part in parts):
            bias_at = aligned(end)
            end = bias_at + rows * 4
        return cls(
            parts=tuple(parts),
            format=weight_format,
            rows=rows,
            columns=columns,
            first_row=first_row,
            weight_bytes=weight_bytes,
            scale_at=scale_at,
            bias_at=bias_at,
            nbytes=end,
            scratch_bytes=scratch,
        )

    def allocate_scratch(self, allocate: Allocate) -> Buffer | None:
        """The scratch, under ``repack/<the current tag without its first segment>``."""
        if not self.scratch_bytes:
            return None
        tag = current_tag()
        with memory_scope(f"repack/{tag.partition('/')[2] or tag}"):
            return allocate(self.scratch_bytes)


def segment_layouts(parts: Sequence[LinearSource]) -> list[SegmentLayout]:
    """Layouts of `parts` stacked along N: neighbours of one format become one segment.

    Raises
    ------
    CheckpointError
        The parts differ in K, or K is not what the format or the repacking asks for.
    """
    columns = parts[0].shape[1]
    for part in parts:
        if part.shape[1] != columns:
            raise CheckpointError(f"{part.name}: {part.shape[1]} columns, its neighbours have {columns}")
        if part.format is WeightFormat.NVFP4 and columns % 16:
            raise CheckpointError(f"{part.name}: NVFP4 needs columns in groups of 16, not {columns}")
    layouts: list[SegmentLayout] = []
    first_row = 0
    for _, group in groupby(parts, key=lambda part: part.format):
        layouts.append(SegmentLayout.of(list(group), first_row))
        first_row += layouts[-1].rows
    return layouts


@allocation_helper
def load_segments(
    parts: Sequence[LinearSource], allocate: Allocate, fill: Fill
) -> list[tuple[SegmentLayout, Buffer]]:
    """Make `parts` resident, one segment after the other: all or none.

    Raises
    ------
    CheckpointError
        As `segment_layouts` does.
    """
    layouts = segment_layouts(parts)
    buffers: list[Buffer] = []
    try:
        for layout in layouts:
            buffers.append(allocate(layout.nbytes))
            scratch = layout.allocate_scratch(allocate)
            try:
                fill(layout, buffers[-1], scratch)
            finally:
                if scratch is not None:
                    scratch.close()
    except BaseException:
        for buffer in buffers:
            buffer.close()  # the traceback would keep it alive
        raise
    return list(zip(layouts, buffers, strict=True))


def bytes_of_rows(part: LinearSource, rows: int) -> int:
    """Bytes of a checkpoint's rows, group scales included."""
    columns = part.shape[1]
    return rows * (columns // 2 + columns // 16 if part.format is WeightFormat.NVFP4 else columns)


def rows_per_chunk(part: LinearSource) -> int:
    """Rows, in whole blocks, that are repacked at once.

    Raises
    ------
    CheckpointError
        Not even one block of rows fits a chunk.
    """
    most = CHUNK_BYTES // bytes_of_rows(part, 1)
    if most < BLOCK_ROWS:
        raise CheckpointError(f"{part.name}: {part.shape[1]} columns are more than the CUDA backend repacks")
    return min(most // BLOCK_ROWS, _MOST_GRID_ROWS - 1) * BLOCK_ROWS
