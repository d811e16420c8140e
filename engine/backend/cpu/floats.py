"""E4M3 and bfloat16, the narrow floats of weights and caches, from and to float32.

They are integer operations without tables or branches, so that a loop over them uses vector registers.
Rounding is to nearest, ties to even. E4M3 is the finite kind of OCP's 8-bit formats (Micikevicius et al.
2022): no infinities, 448 the largest, NaN is S.1111.111.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, int32, uint32

from engine.backend.cpu.jit import kernel

__all__ = ["decode_bf16", "decode_e4m3", "encode_bf16", "encode_e4m3"]

# Every operation is cast back: numba computes in 64 bits, which would halve the elements in a register.


@kernel()
def decode_e4m3(code: np.uint8) -> np.float32:
    """The float32 of an E4M3 code. Exact."""
    magnitude = uint32(code & 0x7F)
    sign = uint32(uint32(code & 0x80) << 24)
    # The exponents' biases are 120 apart. Subnormals, multiples of 2^-9, have no exponent to move.
    normal = uint32(uint32(magnitude << 20) + uint32(120 << 23))
    subnormal = float32(float32(int32(magnitude)) * float32(2.0**-9)).view(uint32)
    bits = subnormal if magnitude < 8 else normal
    bits = uint32(0x7FC0_0000) if magnitude == 0x7F else bits
    return uint32(bits | sign).view(float32)


@kernel()
def encode_e4m3(value: np.float32) -> np.uint8:
    """The nearest E4M3 code, ties to even. What is beyond 448, infinities too, becomes 448; NaN stays NaN."""
    bits = float32(value).view(uint32)
    magnitude = uint32(bits & 0x7FFF_FFFF)
    # Adding half of the last place that is kept (less one, unless that is odd) carries as rounding does.
    odd = uint32(uint32(magnitude >> 20) & 1)
    normal = uint32(uint32(uint32(magnitude + uint32(0x7_FFFF) + odd) >> 20) - uint32(120 << 3))
    # Float32's spacing at 2^14 is 2^-9, E4M3's smallest step: the addition rounds.
    subnormal = uint32(float32(magnitude.view(float32) + float32(16384.0)).view(uint32) & 0xF)
    code = subnormal if magnitude < uint32(121 << 23) else normal
    code = uint32(0x7E) if magnitude >= 0x43E0_0000 else code  # 448
    code = uint32(0x7F) if magnitude > 0x7F80_0000 else code  # infinity
    return np.uint8(uint32(code | uint32(uint32(bits >> 24) & 0x80)))


@kernel()
def decode_bf16(code: np.uint16) -> np.float32:
    """The float32 of a bfloat16 code. Exact."""
    return uint32(uint32(code) << 16).view(float32)


@kernel()
def encode_bf16(value: np.float32) -> np.uint16:
    """The nearest bfloat16 code, ties to even. Beyond the largest is infinity; NaN stays NaN."""
    bits = float32(value).view(uint32)
    high = uint32(bits >> 16)
    rounded = uint32(uint32(bits + uint32(0x7FFF) + uint32(high & 1)) >> 16)
    quiet_nan = uint32(uint32(high & 0x8000) | 0x7FC0)
    code = quiet_nan if uint32(bits & 0x7FFF_FFFF) > 0x7F80_0000 else rounded
    return np.uint16(code)
