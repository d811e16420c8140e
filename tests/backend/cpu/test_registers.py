"""Operations on registers against NumPy's on arrays."""

from __future__ import annotations

import ml_dtypes
import numba
import numpy as np
import pytest

from engine.backend.cpu import registers
from engine.backend.cpu.registers import (
    LANES,
    accumulate_broadcast,
    accumulate_first,
    accumulate_rows,
    decode_e2m1,
    load,
    load_first,
    load_quad,
    shift_right,
    store,
    store_interleaved,
    store_quads,
    store_tokens,
    sum_lanes,
    zero,
    zeros,
)

ONE, TWO, FOUR, EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8


def test_registers_of_this_machine():
    """The kernels choose their tiles by what numba compiles for."""
    features = numba.core.registry.cpu_target.target_context.codegen().magic_tuple()[2]
    assert ("+avx512f" in features.split(",")) == registers.WIDE


@numba.njit
def copy_all(source, out):
    for i in range(0, source.size, LANES):
        store(out, i, load(source, i))


@numba.njit
def copy_first(source, count, out):
    store(out, 0, load_first(source, 1, count))


@pytest.mark.parametrize(
    ("codes", "dtype"),
    [
        (np.arange(256, dtype=np.uint8), ml_dtypes.float8_e4m3fn),
        (np.arange(1 << 16, dtype=np.uint16), ml_dtypes.bfloat16),
        (np.arange(32, dtype=np.float32), np.float32),
    ],
)
def test_loads_decode(codes, dtype):
    out = np.empty(codes.size, np.float32)
    copy_all(codes, out)
    np.testing.assert_array_equal(out, codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize("count", [0, 1, 9, 16])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_the_first_elements_alone(count, dtype):
    source = np.full(1 + count, 0x38).astype(dtype)  # nothing behind them may be read
    source[0] = 0
    out = np.full(LANES, np.nan, np.float32)
    copy_first(source, count, out)
    assert (out[count:] == 0).all()
    assert (out[:count] == out[0]).all()
    assert count == 0 or out[0] != 0


@numba.njit
def decode_words(words, out):
    code = load(words, 0)
    for i in range(8):
        store(out, i * LANES, decode_e2m1(code))
        code = shift_right(code)


def test_codes_come_lowest_first_whatever_is_above_them():
    words = np.random.default_rng(0).integers(0, 1 << 32, LANES, dtype=np.uint32)
    out = np.empty(8 * LANES, np.float32)
    decode_words(words, out)
    codes = (words >> (4 * np.arange(8, dtype=np.uint32))[:, None] & 15).astype(np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(out.reshape(8, LANES), expected)
    np.testing.assert_array_equal(np.signbit(out.reshape(8, LANES)), np.signbit(expected))


@numba.njit
def interleave(source, stride, count, tile, out):
    store_interleaved(out, 0, source, 1, stride, count, tile)


@pytest.mark.parametrize("tile", [ONE, TWO, FOUR, EIGHT])
def test_interleaving(tile):
    for count in range(1, len(tile) + 1):
        stride = 20
        source = np.arange(1 + stride * (count - 1) + LANES, dtype=np.float32)
        out = np.empty(LANES * len(tile), np.float32)
        interleave(source, stride, count, tile, out)
        rows = [1 + stride * min(t, count - 1) for t in range(len(tile))]
        expected = np.stack([source[row : row + LANES] for row in rows])
        np.testing.assert_array_equal(out.reshape(LANES, len(tile)), expected.T)


@numba.njit
def quad_sums(source, tile, out):
    a = accumulate_rows(zeros(tile), load(source, 0), source, 0, LANES)
    b = accumulate_rows(zeros(tile), load(source, 16), source, 0, LANES)
    c = accumulate_rows(zeros(tile), load(source, 32), source, 0, LANES)
    d = accumulate_first(zeros(tile), load(source, 48), source, 0, LANES, 5)
    store_quads(out, 0, 4, sum_lanes(a, b, c, d), tile)


@pytest.mark.parametrize("tile", [ONE, TWO, FOUR])
def test_sums_over_lanes_stand_by_token_and_row(tile):
    source = np.random.default_rng(1).integers(-9, 9, (4, LANES)).astype(np.float32)
    out = np.empty((len(tile), 4), np.float32)
    quad_sums(source.reshape(-1), tile, out.reshape(-1))
    rows = source.copy()
    rows[3, 5:] = 0
    np.testing.assert_array_equal(out, source[: len(tile)] @ rows.T)


@numba.njit
def token_sums(weight, numbers, tile, count, scale, out):
    sums = accumulate_broadcast(zeros(tile), load(weight, 0), numbers, 1)
    store_tokens(out, 2, 20, sums, load_quad(scale, 0), zero(), count)


def test_tokens_are_stored_up_to_the_count():
    weight = np.arange(LANES, dtype=np.float32)
    numbers = np.array([9, 2, 3, 5, 7], np.float32)
    scale = np.array([1, 10, 100, 1000], np.float32)
    for count in range(5):
        out = np.full(100, -1, np.float32)
        token_sums(weight, numbers, FOUR, count, scale, out)
        expected = np.full(100, -1, np.float32)
        for t in range(count):
            expected[2 + 20 * t : 18 + 20 * t] = weight * numbers[1 + t] * np.tile(scale, 4)
        np.testing.assert_array_equal(out, expected)
