"""The kernels for products of activations and weights, the shape of their tiles, and how work is dealt out.

========  ============================================  =====================================================
family    source                                        for
========  ============================================  =====================================================
few       kernels/linear_few.cuh                        1 to 8 tokens, weights in units
hopper    kernels/linear_hopper.cuh                     more tokens, weights in units, compute capability 9.0
portable  kernels/linear.cuh                            everything else
========  ============================================  =====================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache, lru_cache

from engine.backend.cuda.layout import BLOCK_ROWS, LAYOUTS, UNIT_COLUMNS, WeightLayout, units
from engine.backend.protocol import WeightFormat

_BLOCK_RESERVED_BYTES = 1 << 10
"""shared memory that the driver keeps of every block"""
_MOST_STAGES = 8
_LEAST_EFFICIENCY = 0.88
"""Whole tiles are dealt out where so much of the device is busy then; else tiles are split along K."""
_LEAST_STEPS = 4
MOST_SPLIT_TILES = 1 << 16
"""arrival counters that are kept; more tiles than that are dealt out whole"""
ACTIVATION_ALIGNMENT = 8
"""columns that `few` and `hopper` read together: 16 bytes"""


class Family(enum.Enum):
    FEW = "few"
    HOPPER = "hopper"
    PORTABLE = "portable"


@dataclass(frozen=True, slots=True)
class Residency:
    """Blocks that share a multiprocessor."""

    blocks: int
    threads: int
    """of a block"""
    shared_bytes: int
    """dynamic shared memory of a block"""
    least_steps: int
    """fewer are not worth such a block"""


@dataclass(frozen=True, slots=True)
class Product:
    """One compiled kernel: what a block computes and needs."""

    family: Family
    name: str
    declaration: str
    """instantiates it in its family's source"""
    max_tokens: int
    """0: any number"""
    tile_rows: int
    tile_tokens: int
    step_units: int
    """units along K of a step"""
    residencies: tuple[Residency, ...]
    """ways of filling a multiprocessor, the better first"""

    @property
    def partial_bytes(self) -> int:
        """A block's partial sums: two tiles of float32."""
        return 2 * self.tile_rows * self.tile_tokens * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, at most."""
        return max(residency.shared_bytes for residency in self.residencies)


def family_of(format: WeightFormat, columns: int, tokens: int, *, hopper: bool) -> Family:
    """Which family computes a product of `tokens` tokens."""
    if not LAYOUTS[format].stored_in_units or columns % ACTIVATION_ALIGNMENT:
        return Family.PORTABLE
    if tokens <= FEW_TOKENS:
        return Family.FEW
    return Family.HOPPER if hopper else Family.PORTABLE


def families_of(format: WeightFormat, columns: int, *, hopper: bool) -> tuple[Family, ...]:
    """All families that products with this weight may need."""
    return tuple(
        dict.fromkeys(family_of(format, columns, tokens, hopper=hopper) for tokens in (1, FEW_TOKENS + 1))
    )


def module_name(family: Family, format: WeightFormat) -> str:
    return f"linear_{family.value}_{format.value}"


@cache
def products(family: Family, format: WeightFormat, shared_bytes: int) -> tuple[Product, ...]:
    """The kernels of a family by rising number of tokens, for blocks of up to `shared_bytes` of shared
    memory."""
    layout = LAYOUTS[format]
    if family is Family.FEW:
        return (_few(layout, shared_bytes),)
    if family is Family.HOPPER:
        return tuple(_hopper(layout, shared_bytes, shape) for shape in _HOPPER_SHAPES)
    # Few tokens of weights in units come here only if their columns cannot be read together.
    shapes = _PORTABLE_SHAPES[2:] if layout.stored_in_units else _PORTABLE_SHAPES
    return tuple(_portable(layout, shared_bytes, shape) for shape in shapes)


def product_for(family: Family, format: WeightFormat, shared_bytes: int, tokens: int) -> Product:
    """The kernel for `tokens` tokens."""
    kernels = products(family, format, shared_bytes)
    return next(kernel for kernel in kernels if kernel.max_tokens >= tokens or kernel.max_tokens == 0)


def source(family: Family, format: WeightFormat, shared_bytes: int) -> str:
    """CUDA source of `products`."""
    lines = [f'#include "{_HEADERS[family]}"']
    lines += [product.declaration for product in products(family, format, shared_bytes)]
    return "\n".join(lines) + "\n"


_HEADERS = {
    Family.FEW: "linear_few.cuh",
    Family.HOPPER: "linear_hopper.cuh",
    Family.PORTABLE: "linear.cuh",
}


def _name(family: Family, layout: WeightLayout, max_tokens: int) -> str:
    return f"linear_{family.value}_{layout.kernel_type.lower()}_{max_tokens or 'any'}"


def _stages(shared_bytes: int, blocks: int, fixed: int, stage: int, most: int = _MOST_STAGES) -> int:
    """Pipeline stages that let `blocks` blocks share a multiprocessor; two at least."""
    budget = (shared_bytes + _BLOCK_RESERVED_BYTES) // blocks - _BLOCK_RESERVED_BYTES - fixed
    return max(2, min(most, budget // stage))


def _residencies(blocks: int, threads: int, shared_bytes: int) -> tuple[Residency, ...]:
    """Up to `blocks` equal blocks."""
    return tuple(Residency(count, threads, shared_bytes, _LEAST_STEPS) for count in range(blocks, 0, -1))


# -- few ---------------------------------------------------------------------------------------------------

FEW_TOKENS = 8
_FEW_STAGES = {"Nvfp4": 3, "Fp8": 2}
"""Units in flight for a warp. More would leave too small an L1 cache for the activations."""
_FEW_SUMS_BYTES = 1 << 10
"""a warp's two partial row blocks"""
_FEW_RESIDENCIES = ((3, 8), (4, 8), (2, 16), (2, 8))
"""Blocks of a multiprocessor, warps of a block. 24 or 32 warps hide the latency of decoding, 16 do not."""
_FEW_LEAST_WARP_STEPS = 3


def _few(layout: WeightLayout, shared_bytes: int) -> Product:
    stages = _FEW_STAGES.get(layout.kernel_type, 2)
    most_warps = max(blocks * warps for blocks, warps in _FEW_RESIDENCIES)
    while stages > 2 and most_warps * (stages * layout.unit_bytes + _FEW_SUMS_BYTES) > shared_bytes:
        stages -= 1
    warp_bytes = stages * layout.unit_bytes + _FEW_SUMS_BYTES
    name = _name(Family.FEW, layout, FEW_TOKENS)
    return Product(
        family=Family.FEW,
        name=name,
        declaration=f"LINEAR_FEW_KERNEL({name}, {layout.kernel_type}, {stages})",
        max_tokens=FEW_TOKENS,
        tile_rows=BLOCK_ROWS,
        tile_tokens=8,
        step_units=1,
        residencies=tuple(
            Residency(blocks, 32 * warps, warps * warp_bytes, warps * _FEW_LEAST_WARP_STEPS)
            for blocks, warps in _FEW_RESIDENCIES
            if warps * warp_bytes <= shared_bytes
        ),
    )


# -- hopper ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HopperShape:
    """Template arguments of kernels/linear_hopper.cuh."""

    max_tokens: int
    tile_tokens: int
    groups: int
    """warpgroups that multiply"""
    sets: int
    """of 64 rows a warpgroup"""
    blocks: int


_HOPPER_SHAPES = (
    _HopperShape(16, 16, 2, 1, 2),
    _HopperShape(32, 32, 2, 1, 2),
    _HopperShape(64, 64, 4, 1, 1),
    _HopperShape(0, 128, 2, 2, 1),
)
HOPPER_ATOM_TOKENS = 8
HOPPER_ATOM_BYTES = 1024
"""8 tokens by 64 columns of arranged activations"""
_HOPPER_FIXED_BYTES = 2 << 10
"""static shared memory and the alignment of the dynamic part"""


def _hopper(layout: WeightLayout, shared_bytes: int, shape: _HopperShape) -> Product:
    rows = shape.groups * shape.sets * 64
    stage = rows // BLOCK_ROWS * layout.unit_bytes + shape.tile_tokens * UNIT_COLUMNS * 2
    stages = _stages(shared_bytes, shape.blocks, _HOPPER_FIXED_BYTES, stage)
    name = _name(Family.HOPPER, layout, shape.max_tokens)
    arguments = (layout.kernel_type, shape.tile_tokens, shape.groups, shape.sets, stages, shape.blocks)
    return Product(
        family=Family.HOPPER,
        name=name,
        declaration=f"LINEAR_HOPPER_KERNEL({name}, {', '.join(map(str, arguments))})",
        max_tokens=shape.max_tokens,
        tile_rows=rows,
        tile_tokens=shape.tile_tokens,
        step_units=1,
        residencies=_residencies(shape.blocks, shape.groups * 128 + 128, stages * stage),
    )


def arranged_bytes(tokens: int, columns: int) -> int:
    """Bytes of activations arranged for `hopper`; the last tile may be read past its tokens."""
    atoms = -(-tokens // HOPPER_ATOM_TOKENS) * 2 * units(columns)
    return atoms * HOPPER_ATOM_BYTES + max(shape.tile_tokens for shape in _HOPPER_SHAPES) * 128


# -- portable ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PortableShape:
    """Template arguments of kernels/linear.cuh."""

    max_tokens: int
    token_groups: int
    """of 8 tokens a warp (MT)"""
    row_blocks: int
    """of 16 rows a warp (RB)"""
    row_warps: int
    column_warps: int
    token_warps: int
    blocks: int

    @property
    def tile_tokens(self) -> int:
        return self.token_warps * self.token_groups * 8


_PORTABLE_SHAPES = (
    _PortableShape(1, 1, 1, 1, 8, 1, 3),
    _PortableShape(8, 1, 1, 8, 1, 1, 2),
    _PortableShape(16, 2, 1, 8, 1, 1, 2),
    _PortableShape(64, 8, 2, 8, 1, 1, 1),
    _PortableShape(0, 8, 2, 4, 1, 2, 1),
)


def _portable(layout: WeightLayout, shared_bytes: int, shape: _PortableShape) -> Product:
    """With fewer rows a block than `shape` has where two stages of those would not fit."""
    row_warps = shape.row_warps
    x_rows = shape.max_tokens or shape.tile_tokens
    activations = x_rows * (shape.column_warps * UNIT_COLUMNS * 2 + layout.activation_pad)
    while True:
        tile_rows = row_warps * shape.row_blocks * BLOCK_ROWS
        stage = tile_rows // BLOCK_ROWS * shape.column_warps * layout.unit_bytes + activations
        scratch = (shape.column_warps - 1) * tile_rows * shape.tile_tokens * 4
        if row_warps == 1 or 2 * stage + scratch <= shared_bytes:
            break
        row_warps //= 2
    stages = _stages(shared_bytes, shape.blocks, scratch, stage)
    name = _name(Family.PORTABLE, layout, shape.max_tokens)
    arguments = (
        layout.kernel_type,
        x_rows,
        shape.token_groups,
        shape.row_blocks,
        row_warps,
        shape.column_warps,
        shape.token_warps,
        stages,
    )
    return Product(
        family=Family.PORTABLE,
        name=name,
        declaration=f"LINEAR_KERNEL({name}, {', '.join(map(str, arguments))})",
        max_tokens=shape.max_tokens,
        tile_rows=tile_rows,
        tile_tokens=shape.tile_tokens,
        step_units=shape.column_warps,
        residencies=_residencies(
            shape.blocks, 32 * row_warps * shape.column_warps * shape.token_warps, stages * stage + scratch
        ),
    )


# -- dealing out -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkSplit:
    """How a product's tiles are dealt out to blocks."""

    blocks: int
    split: bool
    """blocks may begin and end inside a tile"""
    residency: Residency


@lru_cache(maxsize=4096)
def split_work(product: Product, rows: int, columns: int, tokens: int, multiprocessors: int) -> WorkSplit:
    """Whole tiles if nearly all multiprocessors are busy with them, else equal shares of all steps."""
    tiles = -(-rows // product.tile_rows) * -(-tokens // product.tile_tokens)
    tile_steps = -(-units(columns) // product.step_units)
    last = product.residencies[-1]
    best, whole = 0.0, WorkSplit(min(tiles, multiprocessors * last.blocks), False, last)
    for residency in product.residencies:
        slots = multiprocessors * residency.blocks
        efficiency = tiles / (-(-tiles // slots) * slots)
        worth = residency is last or -(-tiles // slots) * tile_steps >= residency.least_steps
        if worth and efficiency > best + 0.01:
            best, whole = efficiency, WorkSplit(min(tiles, slots), False, residency)
    residency = product.residencies[0]
    steps = tiles * tile_steps
    countable = steps * multiprocessors * residency.blocks < 1 << 32
    if best >= _LEAST_EFFICIENCY or tiles > MOST_SPLIT_TILES or not countable:
        return whole
    blocks = min(multiprocessors * residency.blocks, steps, max(tiles, steps // residency.least_steps))
    return WorkSplit(blocks, True, residency)


def partial_bytes(shared_bytes: int, multiprocessors: int, *, hopper: bool) -> int:
    """Bytes of partial sums that any product needs."""
    families = [Family.FEW, Family.PORTABLE, *([Family.HOPPER] if hopper else [])]
    return max(
        product.partial_bytes * max(residency.blocks for residency in product.residencies) * multiprocessors
        for family in families
        for format in WeightFormat
        for product in products(family, format, shared_bytes)
    )
