"""Linear layers on the device: resident weights, and the choice of a kernel for a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.layout import BLOCK_ROWS, LAYOUTS, UNIT_COLUMNS, WeightLayout, units
from engine.backend.cuda.tensor import CudaTensor, address_of
from engine.backend.protocol import DType, Tensor, WeightFormat

_BLOCK_RESERVED_BYTES = 1 << 10
"""shared memory that the driver keeps of every block"""
_MOST_STAGES = 8
_LEAST_EFFICIENCY = 0.85
"""Whole tiles are dealt out where so much of the device is busy then; else tiles are split along K."""
_LEAST_STEPS = 4
"""Fewer steps than this are not worth a block of their own."""
MOST_SPLIT_TILES = 1 << 16
"""arrival counters that are kept; more tiles than that are dealt out whole"""


@dataclass(slots=True, eq=False)
class LinearSegment:
    """Rows of a linear layer that share one format, in the layout of kernels/formats.cuh."""

    format: WeightFormat
    rows: int
    columns: int
    first_row: int
    """in the layer"""
    weight: CudaTensor
    row_scale: CudaTensor | None
    """float32 [rows]: the parts' global scales, with what decoding leaves out"""
    bias: CudaTensor | None
    """float32 [rows]"""


@dataclass(slots=True, eq=False)
class CudaLinear:
    """A linear layer resident on the device."""

    shape: tuple[int, int]
    segments: list[LinearSegment]

    @property
    def nbytes(self) -> int:
        """Resident bytes, scales and bias included."""
        return sum(segment.weight.buffer.size for segment in self.segments)


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """Template arguments of kernels/linear.cuh, for steps of up to `max_tokens` tokens (0: any number)."""

    max_tokens: int
    token_groups: int
    """of 8 tokens a warp (MT)"""
    row_blocks: int
    """of 16 rows a warp (RB)"""
    row_warps: int
    column_warps: int
    token_warps: int
    blocks_per_multiprocessor: int

    @property
    def tile_rows(self) -> int:
        return self.row_warps * self.row_blocks * BLOCK_ROWS

    @property
    def tile_tokens(self) -> int:
        return self.token_warps * self.token_groups * 8

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.column_warps * self.token_warps

    @property
    def partial_bytes(self) -> int:
        """A block's partial sums: two tiles of float32."""
        return 2 * self.tile_rows * self.tile_tokens * 4

    def stage_bytes(self, layout: WeightLayout, tokens: int | None = None) -> int:
        """Shared memory of one pipeline stage, at most or for a step of `tokens` tokens."""
        if tokens is None:
            tokens = self.max_tokens or self.tile_tokens
        blocks = self.row_warps * self.row_blocks
        stride = self.column_warps * UNIT_COLUMNS * 2 + layout.activation_pad
        return blocks * self.column_warps * layout.unit_bytes + min(tokens, self.tile_tokens) * stride

    @property
    def scratch_bytes(self) -> int:
        """Shared memory in which warps along K add their sums."""
        return (self.column_warps - 1) * self.tile_rows * self.tile_tokens * 4

    def stages(self, layout: WeightLayout, shared_bytes: int) -> int:
        """Pipeline stages that let `blocks_per_multiprocessor` blocks share a multiprocessor; two at
        least."""
        budget = (shared_bytes + _BLOCK_RESERVED_BYTES) // self.blocks_per_multiprocessor
        budget -= _BLOCK_RESERVED_BYTES + self.scratch_bytes
        return max(2, min(_MOST_STAGES, budget // self.stage_bytes(layout)))

    def shared_bytes(self, layout: WeightLayout, stages: int, tokens: int | None = None) -> int:
        """Shared memory of a block, at most or for a step of `tokens` tokens."""
        return stages * self.stage_bytes(layout, tokens) + self.scratch_bytes

    def name(self, layout: WeightLayout) -> str:
        return f"linear_{layout.kernel_type.lower()}_{self.max_tokens}"


KERNELS = (
    LinearKernel(1, 1, 1, 1, 8, 1, 3),
    LinearKernel(4, 1, 1, 1, 8, 1, 2),
    LinearKernel(8, 1, 1, 8, 1, 1, 2),
    LinearKernel(16, 2, 1, 8, 1, 1, 2),
    LinearKernel(32, 4, 2, 8, 1, 1, 1),
    LinearKernel(64, 8, 2, 8, 1, 1, 1),
    LinearKernel(0, 8, 2, 4, 1, 2, 1),
)
"""By rising number of tokens. Few tokens: a block has few rows, and its warps share out K. More: its rows
share the activations, which are the larger part of what it reads."""


@cache
def kernels_that_fit(layout: WeightLayout, shared_bytes: int) -> tuple[LinearKernel, ...]:
    """`KERNELS`, with fewer rows a block where two stages would not fit the device's shared memory."""
    fitting = []
    for kernel in KERNELS:
        while kernel.row_warps > 1 and kernel.shared_bytes(layout, 2) > shared_bytes:
            kernel = replace(kernel, row_warps=kernel.row_warps // 2)
        fitting.append(kernel)
    return tuple(fitting)


def kernel_for(tokens: int, layout: WeightLayout, shared_bytes: int) -> LinearKernel:
    """The kernel for a step of `tokens` tokens."""
    kernels = kernels_that_fit(layout, shared_bytes)
    return next(kernel for kernel in kernels if kernel.max_tokens >= tokens or kernel.max_tokens == 0)


def linear_source(format: WeightFormat, shared_bytes: int) -> str:
    """Source of all kernels of one format, for a device whose blocks may have `shared_bytes` of shared
    memory."""
    layout = LAYOUTS[format]
    lines = ['#include "linear.cuh"']
    for k in kernels_that_fit(layout, shared_bytes):
        arguments = (
            k.token_groups,
            k.row_blocks,
            k.row_warps,
            k.column_warps,
            k.token_warps,
            k.stages(layout, shared_bytes),
        )
        lines.append(
            f"LINEAR_KERNEL({k.name(layout)}, {layout.kernel_type}, {', '.join(map(str, arguments))})"
        )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class WorkSplit:
    """How a product's tiles are dealt out to blocks."""

    blocks: int
    split: bool
    """blocks may begin and end inside a tile"""


@lru_cache(maxsize=4096)
def split_work(kernel: LinearKernel, rows: int, columns: int, tokens: int, multiprocessors: int) -> WorkSplit:
    """Whole tiles if nearly all multiprocessors are busy with them, else equal shares of all steps."""
    slots = multiprocessors * kernel.blocks_per_multiprocessor
    tiles = -(-rows // kernel.tile_rows) * -(-tokens // kernel.tile_tokens)
    width = multiprocessors if tiles <= slots else slots
    efficiency = tiles / (-(-tiles // width) * width)
    if efficiency >= _LEAST_EFFICIENCY or tiles > MOST_SPLIT_TILES:
        return WorkSplit(min(tiles, slots), False)
    steps = tiles * -(-units(columns) // kernel.column_warps)
    return WorkSplit(min(slots, steps, max(tiles, steps // _LEAST_STEPS)), True)


def workspace_bytes(multiprocessors: int) -> tuple[int, int]:
    """Bytes of partial sums and of arrival counters that any product needs."""
    partial = max(k.partial_bytes * k.blocks_per_multiprocessor * multiprocessors for k in KERNELS)
    return partial, MOST_SPLIT_TILES * 4


class LinearOperation:
    """Launches the products."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._partials: CudaTensor | None = None
        self._arrived: CudaTensor | None = None

    def load(self, formats: Sequence[WeightFormat]) -> None:
        """Compile the kernels of these formats."""
        for format in formats:
            self._device.load(f"linear_{format.value}", linear_source(format, self._device.shared_bytes))

    def reserve(self, partials: CudaTensor, arrived: CudaTensor) -> None:
        """Scratch of `workspace_bytes`; `arrived` is zero, and zero again after every product."""
        self._partials, self._arrived = partials, arrived

    def __call__(self, x: Tensor, weight: CudaLinear, out: Tensor) -> None:
        assert self._partials, "reserve() comes before linear()"
        assert self._arrived
        tokens, stride = x.shape[0], out.shape[1]
        if tokens == 0:
            return
        for segment in weight.segments:
            layout = LAYOUTS[segment.format]
            kernel = kernel_for(tokens, layout, self._device.shared_bytes)
            stages = kernel.stages(layout, self._device.shared_bytes)
            most = kernel.shared_bytes(layout, stages)
            x_rows = min(tokens, kernel.tile_tokens)
            work = split_work(kernel, segment.rows, segment.columns, tokens, self._device.multiprocessors)
            self._device.launch(
                self._device.kernel(f"linear_{segment.format.value}", kernel.name(layout), shared_bytes=most),
                (work.blocks,),
                kernel.threads,
                segment.weight.address,
                segment.row_scale.address if segment.row_scale else 0,
                segment.bias.address if segment.bias else 0,
                address_of(x),
                address_of(out) + segment.first_row * out.dtype.itemsize,
                stride,
                int(out.dtype is DType.FLOAT32),
                tokens,
                segment.rows,
                segment.columns,
                int(work.split),
                x_rows,
                self._partials.address,
                self._arrived.address,
                shared_bytes=kernel.shared_bytes(layout, stages, tokens),
            )
