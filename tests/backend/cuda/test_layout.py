"""The resident layouts, by a model of what the kernels do with their bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda.layout import LAYOUTS, NVFP4_EXPONENT, units
from engine.backend.protocol import WeightFormat
from tests.backend.cuda.reference import (
    E2M1,
    codes_of,
    decode_scale,
    decode_word,
    dense,
    encode_scale,
    from_e4m3,
    pack_fp8,
    pack_nvfp4,
    place_codes,
    random_linear,
    unpack_nvfp4,
)


def test_the_places_of_a_word_share_no_bit_and_leave_none() -> None:
    masks = [int(place_codes(np.array([15, 15], np.uint8), place)) for place in range(4)]
    assert sum(masks) == 0xFFFFFFFF
    assert masks[0] | masks[1] | masks[2] | masks[3] == 0xFFFFFFFF


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_a_word_decodes_to_the_values_of_its_codes(codes: list[int]) -> None:
    pairs = np.array(codes, np.uint8).reshape(4, 2)
    word = np.bitwise_or.reduce([place_codes(pair, place) for place, pair in enumerate(pairs)])
    decoded = decode_word(np.uint32(word)[None])[0].view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(decoded * 2.0**126, E2M1[pairs])


def test_every_positive_scale_is_kept() -> None:
    scales = np.arange(1, 0x7F, dtype=np.uint8)
    decoded = decode_scale(encode_scale(scales)).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(decoded * 2.0**-106, from_e4m3(scales))
    assert len(set(encode_scale(scales).tolist())) == len(scales)


def test_every_product_of_code_and_scale_is_exact_in_bfloat16() -> None:
    products = np.multiply.outer(E2M1[:8], from_e4m3(np.arange(0, 0x7F, dtype=np.uint8)))
    products = products * 2.0**-NVFP4_EXPONENT
    rounded = products.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.astype(np.float64), products)
    normal = np.abs(products[products != 0]) >= 2.0**-126
    assert normal.all()


@pytest.mark.parametrize(
    ("rows", "columns"), [(16, 128), (1, 16), (17, 144), (40, 400), (64, 256), (300, 272)]
)
def test_packing_loses_nothing(rows: int, columns: int) -> None:
    source = random_linear(np.random.default_rng(rows), WeightFormat.NVFP4, rows, columns)
    assert source.group_scales is not None
    assert (source.group_scales & 0x7F == 0).any()
    resident = pack_nvfp4(codes_of(source.weight), source.group_scales)
    unpacked = unpack_nvfp4(resident, rows, columns) * np.float32(source.global_scale)
    np.testing.assert_array_equal(unpacked, dense(source))


@pytest.mark.parametrize("format", [WeightFormat.NVFP4, WeightFormat.FP8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (1, 16), (17, 144), (40, 400)])
def test_the_backend_counts_the_bytes_that_the_layout_takes(
    format: WeightFormat, rows: int, columns: int
) -> None:
    source = random_linear(np.random.default_rng(0), format, rows, columns)
    if format is WeightFormat.NVFP4:
        assert source.group_scales is not None
        resident = pack_nvfp4(codes_of(source.weight), source.group_scales)
    else:
        resident = pack_fp8(source.weight)
    assert LAYOUTS[format].nbytes(rows, columns) == resident.size
    assert resident.size % units(columns) == 0


def test_four_bits_stay_four_bits() -> None:
    assert LAYOUTS[WeightFormat.NVFP4].nbytes(4096, 4096) == 4096 * 4096 * 9 // 16
