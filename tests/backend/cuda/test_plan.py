"""How work is dealt out: what must hold for any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda.attention import AttentionPlan, decode_splits
from engine.backend.cuda.layout import units
from engine.backend.cuda.loading import row_chunks
from engine.backend.cuda.products import (
    MOST_SPLIT_TILES,
    Family,
    arranged_bytes,
    families_of,
    family_of,
    partial_bytes,
    product_for,
    products,
    source,
    split_work,
)
from engine.backend.cuda.segments import bytes_of_rows
from engine.backend.cuda.staging import CHUNK_BYTES
from engine.backend.protocol import LinearSource, WeightFormat
from engine.errors import CheckpointError
from tests.backend.cuda.reference import Sequences

SHARED_BYTES = [101_376, 166_912, 232_448]
FORMATS = st.sampled_from(list(WeightFormat))
FAMILIES = st.sampled_from(list(Family))


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("family", list(Family))
def test_every_kernel_fits_the_shared_memory(family: Family, format: WeightFormat, shared_bytes: int) -> None:
    if family is Family.HOPPER and shared_bytes < 232_448:
        return  # such a device has all of it
    names = set()
    for product in products(family, format, shared_bytes):
        assert 0 < product.shared_bytes <= shared_bytes
        assert product.name in product.declaration
        assert product.declaration in source(family, format, shared_bytes)
        names.add(product.name)
    assert len(names) == len(products(family, format, shared_bytes))


@given(FORMATS, st.integers(1, 70_000), st.integers(1, 40_000), st.booleans())
def test_every_product_has_a_kernel_that_was_compiled_for_the_layer(
    format: WeightFormat, columns: int, tokens: int, hopper: bool
) -> None:
    family = family_of(format, columns, tokens, hopper=hopper)
    assert family in families_of(format, columns, hopper=hopper)
    product = product_for(family, format, 232_448, tokens)
    # Kernels that are bounded have one tile of tokens.
    assert product.max_tokens == 0 or tokens <= product.tile_tokens
    assert family is not Family.HOPPER or hopper
    if family is not Family.PORTABLE:
        assert columns % 8 == 0
        assert format is not WeightFormat.BF16


@given(
    FAMILIES,
    FORMATS,
    st.integers(1, 200_000),
    st.integers(1, 40_000),
    st.integers(1, 5000),
    st.integers(1, 200),
)
def test_work_is_dealt_out_within_the_workspace(
    family: Family, format: WeightFormat, rows: int, columns: int, tokens: int, multiprocessors: int
) -> None:
    if family is Family.FEW:
        tokens = min(tokens, 8)
    product = product_for(family, format, 232_448, tokens)
    work = split_work(product, rows, columns, tokens, multiprocessors)
    tiles = -(-rows // product.tile_rows) * -(-tokens // product.tile_tokens)
    steps = tiles * -(-units(columns) // product.step_units)
    assert 1 <= work.blocks <= steps
    if work.split:
        assert tiles <= MOST_SPLIT_TILES
        assert work.blocks * product.partial_bytes <= partial_bytes(232_448, multiprocessors, hopper=True)
    else:
        assert work.blocks <= tiles


@given(st.integers(1, 40_000), st.integers(1, 70_000))
def test_arranged_activations_have_room_for_the_last_tile(tokens: int, columns: int) -> None:
    atoms, column_tiles = -(-tokens // 8), 2 * units(columns)
    for product in products(Family.HOPPER, WeightFormat.NVFP4, 232_448):
        first = (tokens - 1) // product.tile_tokens * product.tile_tokens // 8
        last_read = ((column_tiles - 1) * atoms + first) * 1024 + product.tile_tokens * 128
        assert last_read <= arranged_bytes(tokens, columns)


@given(st.integers(1, 3000), st.integers(1, 100_000), st.integers(1, 64))
def test_splits_are_bounded(blocks: int, length: int, most: int) -> None:
    splits = decode_splits(blocks, length, 132, most)
    assert 1 <= splits <= most
    assert splits == 1 or length // splits >= 256


def test_one_long_sequence_is_split_over_the_device() -> None:
    assert decode_splits(8, 32_768, 132, 64) * 8 >= 132


def test_an_attention_plan_tells_decoding_from_prefill() -> None:
    batch = Sequences([700, 33, 900], [1, 33, 20], 16).batch(np.random.default_rng(0), 200, 60)
    assert AttentionPlan.of(batch) == AttentionPlan(decodes=True, longest_query=33, longest_decode=700)
    batch = Sequences([33], [33], 16).batch(np.random.default_rng(0), 200, 60)
    assert AttentionPlan.of(batch) == AttentionPlan(decodes=False, longest_query=33, longest_decode=0)


@pytest.mark.parametrize("format", [WeightFormat.NVFP4, WeightFormat.FP8])
@pytest.mark.parametrize("first_row", [0, 5, 16, 40])
def test_chunks_cover_a_part_and_end_at_row_blocks(format: WeightFormat, first_row: int) -> None:
    part = LinearSource("layer", format, (1000, 65_536), np.empty(0, np.uint8))
    chunks = list(row_chunks(part, first_row))
    assert len(chunks) > 1
    assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == 1000
    for begin, end in chunks:
        assert 0 < bytes_of_rows(part, end - begin) <= CHUNK_BYTES
    for _, end in chunks[:-1]:
        assert (first_row + end) % 16 == 0


def test_columns_that_no_chunk_holds_are_refused() -> None:
    part = LinearSource("layer", WeightFormat.FP8, (1, CHUNK_BYTES // 8), np.empty(0, np.uint8))
    with pytest.raises(CheckpointError, match="more than the CUDA backend repacks"):
        list(row_chunks(part, 0))
