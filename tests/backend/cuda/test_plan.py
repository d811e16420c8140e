"""How work is dealt out: what must hold for any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda.attention import AttentionPlan, decode_splits
from engine.backend.cuda.layout import LAYOUTS, units
from engine.backend.cuda.linear import kernel_for, kernels_that_fit, split_work, workspace_bytes
from engine.backend.cuda.loading import bytes_of_rows, row_chunks
from engine.backend.cuda.staging import CHUNK_BYTES
from engine.backend.protocol import WeightFormat
from engine.errors import CheckpointError
from tests.backend.cuda.reference import Sequences, random_linear

SHARED_BYTES = [101_376, 166_912, 232_448]
FORMATS = st.sampled_from(list(WeightFormat))


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
@pytest.mark.parametrize("format", list(WeightFormat))
def test_every_kernel_fits_the_shared_memory(format: WeightFormat, shared_bytes: int) -> None:
    layout = LAYOUTS[format]
    for kernel in kernels_that_fit(layout, shared_bytes):
        stages = kernel.stages(layout, shared_bytes)
        assert stages >= 2
        assert kernel.shared_bytes(layout, stages) <= shared_bytes


@given(FORMATS, st.sampled_from(SHARED_BYTES), st.integers(1, 40_000))
def test_a_kernel_with_one_token_warp_has_one_tile_of_tokens(
    format: WeightFormat, shared_bytes: int, tokens: int
) -> None:
    kernel = kernel_for(tokens, LAYOUTS[format], shared_bytes)
    assert kernel.token_warps > 1 or tokens <= kernel.tile_tokens


@given(FORMATS, st.integers(1, 200_000), st.integers(1, 40_000), st.integers(1, 5000), st.integers(1, 200))
def test_work_is_dealt_out_within_the_workspace(
    format: WeightFormat, rows: int, columns: int, tokens: int, multiprocessors: int
) -> None:
    kernel = kernel_for(tokens, LAYOUTS[format], 232_448)
    work = split_work(kernel, rows, columns, tokens, multiprocessors)
    tiles = -(-rows // kernel.tile_rows) * -(-tokens // kernel.tile_tokens)
    steps = tiles * -(-units(columns) // kernel.column_warps)
    partial_bytes, arrival_bytes = workspace_bytes(multiprocessors)
    assert 1 <= work.blocks <= steps
    if work.split:
        assert tiles * 4 <= arrival_bytes
        assert work.blocks * kernel.partial_bytes <= partial_bytes
    else:
        assert work.blocks <= tiles


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
    part = random_linear(np.random.default_rng(0), format, 1000, 65_536)
    chunks = list(row_chunks(part, first_row))
    assert len(chunks) > 1
    assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == 1000
    for begin, end in chunks:
        assert 0 < bytes_of_rows(part, end - begin) <= CHUNK_BYTES
    for _, end in chunks[:-1]:
        assert (first_row + end) % 16 == 0


def test_columns_that_no_chunk_holds_are_refused() -> None:
    part = random_linear(np.random.default_rng(0), WeightFormat.FP8, 1, CHUNK_BYTES // 8)
    with pytest.raises(CheckpointError, match="more than the CUDA backend repacks"):
        list(row_chunks(part, 0))
