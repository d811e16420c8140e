"""The exponential function in float32, as loops over vector registers can compute it."""

from __future__ import annotations

from numpy import float32, int32

from engine.backend.cpu.jit import CONTRACT, kernel

__all__ = ["exp"]


@kernel(fastmath=CONTRACT)
def exp(x: float32) -> float32:
    """``e ** x`` to 1.5 units of the last place; arguments are taken to lie in -87.33 .. 88. NaN stays NaN.

    Cephes' expf (Moshier 1992): ``x = n ln 2 + r`` with the constant in two pieces, a polynomial for
    ``e ** r``, and n in the exponent field.
    """
    # Compared this way round, NaN is left alone.
    x = float32(-87.33) if x < float32(-87.33) else x
    x = float32(88.0) if x > float32(88.0) else x
    shift = float32(12582912.0)  # 1.5 * 2^23, where float32's spacing is 1: the addition rounds
    n = (x * float32(1.44269504) + shift) - shift
    r = x - n * float32(0.693359375)
    r = r - n * float32(-2.12194440e-4)
    p = float32(1.9875691500e-4)
    p = p * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    p = p * (r * r) + r + float32(1.0)
    return p * int32(int32(int32(n) + int32(127)) << 23).view(float32)
