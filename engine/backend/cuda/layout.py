"""Sizes of the resident weight layouts that kernels/formats.cuh defines, and how checkpoint weights get
there."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend.protocol import WeightFormat

BLOCK_ROWS = 16
UNIT_COLUMNS = 128

NVFP4_UNIT_BYTES = 1152
"""16 rows by 128 columns: 1024 bytes of codes, 128 of scales"""
FP8_UNIT_BYTES = 2048
BF16_UNIT_BYTES = 4096
"""of a unit in shared memory; in device memory these weights are row-major"""

NVFP4_EXPONENT = 20
"""decoded NVFP4 weights are value * 2^-20; the row scale carries the rest"""


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """What of a device decides how much scratch its kernels want."""

    multiprocessors: int
    shared_bytes: int
    """of shared memory that a block may ask for"""
    hopper: bool
    """compute capability 9.0"""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """One format: its name in kernels/formats.cuh, and what a unit takes."""

    kernel_type: str
    unit_bytes: int
    activation_pad: int
    """bytes between rows of activations in shared memory, against bank conflicts"""
    stored_in_units: bool

    def nbytes(self, rows: int, columns: int) -> int:
        """Resident bytes of a matrix, its row scales and bias not counted."""
        if not self.stored_in_units:
            return rows * columns * 2
        return -(-rows // BLOCK_ROWS) * units(columns) * self.unit_bytes


LAYOUTS = {
    WeightFormat.NVFP4: WeightLayout("Nvfp4", NVFP4_UNIT_BYTES, 16, True),
    WeightFormat.FP8: WeightLayout("Fp8", FP8_UNIT_BYTES, 16, True),
    WeightFormat.BF16: WeightLayout("Bf16", BF16_UNIT_BYTES, 64, False),
}


def units(columns: int) -> int:
    """Units along K; the last may be padded with zeros."""
    return -(-columns // UNIT_COLUMNS)
