"""Narrow floats, against ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numba
import numpy as np
import pytest

from engine.backend.cpu.floats import decode_bf16, decode_e4m3, encode_bf16, encode_e4m3

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16)
ALL_E4M3 = np.arange(256, dtype=np.uint8)


def over_array(kernel: Callable) -> Callable[[np.ndarray, np.dtype], np.ndarray]:
    """`kernel` in a compiled loop, which is how it is used: in vector registers."""

    @numba.njit
    def loop(source: np.ndarray, target: np.ndarray) -> None:
        for i in range(source.size):
            target[i] = kernel(source[i])

    def apply(source: np.ndarray, dtype: np.dtype) -> np.ndarray:
        target = np.empty(source.size, dtype)
        loop(source, target)
        return target

    return apply


@pytest.fixture(scope="module")
def to_e4m3() -> Callable:
    return over_array(encode_e4m3)


@pytest.fixture(scope="module")
def to_bf16() -> Callable:
    return over_array(encode_bf16)


def values_to_encode() -> np.ndarray:
    """Every bfloat16, every E4M3, all midpoints of neighbours and what is next to them, and random bits."""
    bf16 = ALL_BF16.view(ml_dtypes.bfloat16).astype(np.float32)
    e4m3 = np.sort(ALL_E4M3[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    midpoints = (e4m3[1:] + e4m3[:-1]) / 2
    edges = np.concatenate([e4m3, midpoints, np.array([448, 464, 480, 2**-10, 2**-11], np.float32)])
    around = np.concatenate(
        [edges, np.nextafter(edges, np.float32(1e9)), np.nextafter(edges, np.float32(-1e9))]
    )
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    return np.concatenate([bf16, around, -around, random])


def test_every_e4m3_code_decodes() -> None:
    decoded = over_array(decode_e4m3)(ALL_E4M3, np.float32)
    expected = ALL_E4M3.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(expected))
    assert np.isnan(decoded[[0x7F, 0xFF]]).all()


def test_every_bf16_code_decodes() -> None:
    decoded = over_array(decode_bf16)(ALL_BF16, np.float32)
    np.testing.assert_array_equal(decoded.view(np.uint32), ALL_BF16.astype(np.uint32) << 16)


def test_e4m3_rounds_to_nearest_even_and_saturates(to_e4m3: Callable) -> None:
    values = values_to_encode()
    assert np.isnan(values).any()
    with np.errstate(invalid="ignore"):
        expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(to_e4m3(values, np.uint8), expected)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448.0, 0x7E),
        (449.0, 0x7E),
        (1e30, 0x7E),
        (np.inf, 0x7E),
        (-np.inf, 0xFE),
        (np.nan, 0x7F),
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),  # a tie goes to the even code
        (3 * 2.0**-10, 0x02),
        (17.0, 0x58),  # between 16 and 18
        (19.0, 0x5A),  # between 18 and 20
    ],
)
def test_e4m3_of(value: float, code: int) -> None:
    assert encode_e4m3(np.float32(value)) == code


def test_e4m3_codes_survive_a_round_trip(to_e4m3: Callable) -> None:
    decoded = over_array(decode_e4m3)(ALL_E4M3, np.float32)
    finite = ~np.isnan(decoded)
    np.testing.assert_array_equal(to_e4m3(decoded, np.uint8)[finite], ALL_E4M3[finite])


def test_bf16_rounds_to_nearest_even(to_bf16: Callable) -> None:
    exact = ALL_BF16.astype(np.uint32) << 16
    halfway = np.concatenate([exact + low for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).astype(np.uint32)
    values = np.concatenate([halfway.view(np.float32), values_to_encode()])
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    encoded = to_bf16(values, np.uint16)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(encoded[finite], expected.view(np.uint16)[finite])
    assert np.isnan(encoded[~finite].view(ml_dtypes.bfloat16)).all()
