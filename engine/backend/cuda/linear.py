"""Linear layers on the device: what is resident of them, and their products with activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.layout import units
from engine.backend.cuda.products import (
    Family,
    families_of,
    family_of,
    module_name,
    product_for,
    source,
    split_work,
)
from engine.backend.cuda.reservation import ArrangedActivations
from engine.backend.cuda.tensor import CudaTensor, address_of
from engine.backend.protocol import DType, LinearSource, Tensor, WeightFormat

_ARRANGE_THREADS = 256
_ARRANGE_WARP_TILES = 4
"""tiles of 64 columns of one token that a warp arranges"""


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


class LinearOperation:
    """Launches the products."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._hopper = device.shape.hopper
        self.arranged = ArrangedActivations(device.shape)
        """of the layers that were loaded"""
        self._partials: CudaTensor | None = None
        self._arrived: CudaTensor | None = None
        self._arranged: CudaTensor | None = None

    def load(self, parts: Sequence[LinearSource]) -> None:
        """Compile the kernels that these layers need."""
        self.arranged.add(parts)
        for part in parts:
            columns = part.shape[1]
            for family in families_of(part.format, columns, hopper=self._hopper):
                text = source(family, part.format, self._device.shared_bytes)
                self._device.load(module_name(family, part.format), text)

    def reserve(self, partials: CudaTensor, arrived: CudaTensor, arranged: CudaTensor | None) -> None:
        """The memory of `reserve_step`; `arrived` is zero."""
        self._partials, self._arrived, self._arranged = partials, arrived, arranged

    def __call__(self, x: Tensor, weight: CudaLinear, out: Tensor) -> None:
        assert self._partials, "reserve() comes before linear()"
        tokens, columns = x.shape[0], weight.shape[1]
        at_once = tokens
        if any(self._family(segment, tokens) is Family.HOPPER for segment in weight.segments):
            at_once = self.arranged.tokens_at_once(tokens, columns)
        for begin in range(0, tokens, at_once or 1):
            count = min(at_once, tokens - begin)
            x_address = address_of(x) + begin * columns * 2
            out_address = address_of(out) + begin * out.shape[1] * out.dtype.itemsize
            arranged = False
            for segment in weight.segments:
                family = self._family(segment, tokens)
                if family is Family.HOPPER and not arranged:
                    self._arrange(x_address, count, columns)
                    arranged = True
                self._multiply(family, segment, x_address, count, out, out_address)

    def _family(self, segment: LinearSegment, tokens: int) -> Family:
        return family_of(segment.format, segment.columns, tokens, hopper=self._hopper)

    def _arrange(self, x_address: int, tokens: int, columns: int) -> None:
        assert self._arranged, "the layer was loaded after reserve()"
        tiles = 2 * units(columns)
        warps = tokens * -(-tiles // _ARRANGE_WARP_TILES)
        self._device.launch(
            self._device.kernel("tiling", "tile_activations"),
            (-(-warps * 32 // _ARRANGE_THREADS),),
            _ARRANGE_THREADS,
            x_address,
            self._arranged.address,
            tokens,
            columns,
            tiles,
        )

    def _multiply(
        self,
        family: Family,
        segment: LinearSegment,
        x_address: int,
        tokens: int,
        out: Tensor,
        out_address: int,
    ) -> None:
        assert self._partials
        assert self._arrived
        if family is Family.HOPPER:
            assert self._arranged
            x_address = self._arranged.address
        product = product_for(family, segment.format, self._device.shared_bytes, tokens)
        work = split_work(product, segment.rows, segment.columns, tokens, self._device.multiprocessors)
        self._device.launch(
            self._device.kernel(
                module_name(family, segment.format), product.name, shared_bytes=product.shared_bytes
            ),
            (work.blocks,),
            work.residency.threads,
            segment.weight.address,
            segment.row_scale.address if segment.row_scale else 0,
            segment.bias.address if segment.bias else 0,
            x_address,
            out_address + segment.first_row * out.dtype.itemsize,
            out.shape[1],
            int(out.dtype is DType.FLOAT32),
            tokens,
            segment.rows,
            segment.columns,
            int(work.split),
            self._partials.address,
            self._arrived.address,
            shared_bytes=work.residency.shared_bytes,
        )
