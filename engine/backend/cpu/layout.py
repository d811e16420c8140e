"""What the CPU backend asks memory for, in which order and under which tags.

The backend allocates through these functions, and so does a plan of it: there is no second account of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np

from engine.backend.cpu.register_types import LANES, WIDE
from engine.backend.protocol import DType, LinearSource, StepLimits, Tensor, WeightFormat
from engine.errors import CheckpointError
from engine.memory.scope import allocation_helper, memory_scope

__all__ = [
    "LARGEST_TILE",
    "PARTIALS",
    "SCRATCH_FLOATS",
    "Allocate",
    "InputTensors",
    "RowsLayout",
    "StepMemory",
    "linear_layouts",
    "nvfp4_pieces",
    "reserve_step",
]

T = TypeVar("T", bound=Tensor)
Allocate = Callable[[tuple[int, ...], DType], T]
"""Makes an uninitialised tensor out of the injected memory."""

SCRATCH_FLOATS = 1 << 18
"""scratch for each thread: room for attention's tile of queries, keys, values and scores"""
PARTIALS = 1 << 20
"""floats for what chunks of the past leave behind; they are only touched as far as a step needs"""
LARGEST_TILE = 8 if WIDE else 2
"""tokens that a product of NVFP4 weights keeps the sums of in registers"""
_GROUP = 16
"""columns with one scale"""
_QUAD = 4
"""rows that a product of plain weights computes together"""


# -- linear layers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RowsLayout:
    """Consecutive rows of a linear layer that share a format."""

    sources: tuple[LinearSource, ...]
    rows: int
    columns: int
    format: WeightFormat
    shapes: tuple[tuple[tuple[int, ...], DType], ...]
    """of the tensors that hold them: NVFP4 has all in one, others the weight and, if any, rows' factors"""
    scratch_size: int
    """float32 elements of scratch that each thread needs for the product"""

    @classmethod
    def of(cls, sources: Sequence[LinearSource]) -> RowsLayout:
        """The layout of `sources` below each other.

        Raises
        ------
        CheckpointError
            K is not what the format asks for.
        """
        rows, columns = sum(source.shape[0] for source in sources), sources[0].shape[1]
        weight_format = sources[0].format
        has_bias = any(source.bias is not None for source in sources)
        shapes: list[tuple[tuple[int, ...], DType]]
        if weight_format is WeightFormat.NVFP4:
            if columns % _GROUP:
                raise CheckpointError(
                    f"{sources[0].name}: NVFP4 needs columns in groups of 16, not {columns}"
                )
            pieces = nvfp4_pieces(rows, columns, has_bias)
            shapes = [((sum(piece.nbytes for piece in pieces),), DType.UINT8)]
            # A tile of `x` and a register for each of its tokens.
            scratch = (columns + LANES) * LARGEST_TILE
        else:
            is_bf16 = weight_format is WeightFormat.BF16
            shapes = [((rows, columns), DType.BFLOAT16 if is_bf16 else DType.FLOAT8_E4M3)]
            if has_bias or not is_bf16:
                shapes.append(((2, -(-rows // _QUAD) * _QUAD), DType.FLOAT32))
            scratch = LANES
        return cls(tuple(sources), rows, columns, weight_format, tuple(shapes), scratch)

    def allocate(self, allocate: Allocate[T]) -> list[T]:
        """The tensors of `shapes`; all or none."""
        tensors: list[T] = []
        try:
            for shape, dtype in self.shapes:
                tensors.append(allocate(shape, dtype))
        except BaseException:
            for tensor in tensors:
                tensor.buffer.close()  # the traceback would keep it alive
            raise
        return tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """An array inside of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def nvfp4_pieces(rows: int, columns: int, has_bias: bool) -> list[Piece]:
    """Codes, scales, row scales and biases of NVFP4 rows, one behind the other in one tensor.

    Rows come in blocks of a register's lanes; those behind the last are zeros.
    """
    blocks = -(-rows // LANES)
    return [
        Piece((blocks, columns // 8, LANES), np.dtype(np.uint32)),
        Piece((blocks, columns // _GROUP, LANES), np.dtype(np.uint8)),
        Piece((blocks * LANES,), np.dtype(np.float32)),
        Piece((blocks * LANES if has_bias else 0,), np.dtype(np.float32)),
    ]


def linear_layouts(parts: Sequence[LinearSource]) -> list[RowsLayout]:
    """Layouts of `parts` stacked along N: neighbours of one format become one run of rows.

    Raises
    ------
    CheckpointError
        The parts differ in K, or K is not what the format asks for.
    """
    columns = parts[0].shape[1]
    for source in parts:
        if source.shape[1] != columns:
            raise CheckpointError(f"{source.name}: {source.shape[1]} columns, its neighbours have {columns}")
    return [RowsLayout.of(list(run)) for _, run in groupby(parts, key=lambda part: part.format)]


# -- steps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputTensors(Generic[T]):
    """A step's inputs, and how its tokens are sorted for attention."""

    token_ids: T
    positions: T
    slot_mapping: T
    query_start: T
    seq_lens: T
    block_tables: T
    logits_rows: T
    decode_tokens: T
    decode_sequences: T
    prefill_sequences: T


@dataclass(frozen=True, slots=True)
class StepMemory(Generic[T]):
    """What steps up to some limits need beside the model's activations."""

    inputs: InputTensors[T]
    scratch: T
    """float32 [threads, n]"""
    partials: T
    """float32 [`PARTIALS`]"""


def reserve_step(
    limits: StepLimits, threads: int, linear_scratch: int, allocate: Allocate[T]
) -> StepMemory[T]:
    """Allocate io buffers and kernel scratch for steps up to `limits`.

    Parameters
    ----------
    linear_scratch
        float32 elements of scratch that a thread needs for any of the linear layers.
    """
    tokens, seqs = limits.max_tokens, limits.max_seqs

    @allocation_helper
    def reserve(tag: str, shape: tuple[int, ...], dtype: DType = DType.INT32) -> T:
        with memory_scope(tag):
            return allocate(shape, dtype)

    inputs = InputTensors(
        token_ids=reserve("io/token_ids", (tokens,)),
        positions=reserve("io/positions", (tokens,)),
        slot_mapping=reserve("io/slot_mapping", (tokens,), DType.INT64),
        query_start=reserve("io/query_start", (seqs + 1,)),
        seq_lens=reserve("io/seq_lens", (seqs,)),
        block_tables=reserve("io/block_tables", (seqs, limits.max_blocks_per_seq)),
        logits_rows=reserve("io/logits_rows", (limits.max_logits_rows,)),
        decode_tokens=reserve("io/decode_tokens", (tokens,)),
        decode_sequences=reserve("io/decode_sequences", (tokens,)),
        prefill_sequences=reserve("io/prefill_sequences", (seqs,)),
    )
    scratch_shape = (threads, max(SCRATCH_FLOATS, linear_scratch))
    return StepMemory(
        inputs,
        scratch=reserve("workspace/scratch", scratch_shape, DType.FLOAT32),
        partials=reserve("workspace/attention.partials", (PARTIALS,), DType.FLOAT32),
    )
