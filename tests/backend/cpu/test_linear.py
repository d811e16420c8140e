"""Linear layers against float64 products of weights that ml_dtypes decodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backend.cpu.linear import CpuLinear, load_linear, scratch_size
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import DType, LinearSource, WeightFormat
from engine.errors import CheckpointError
from engine.memory.adaptors import Fault, FaultInjectingMemoryResource
from engine.memory.errors import OutOfMemoryError
from engine.memory.resources import HostMemoryResource

E4M3_NAN = 0x7F


def allocator(memory: HostMemoryResource):
    def allocate(shape: tuple[int, ...], dtype: DType) -> HostTensor:
        size = int(np.prod(shape)) * dtype.itemsize
        tensor = HostTensor.of(memory.allocate(size, stream=None), shape, dtype)
        tensor.array.view(np.uint8).fill(0xAA)  # fresh memory is not zero
        return tensor

    return allocate


@pytest.fixture
def allocate(memory: HostMemoryResource):
    return allocator(memory)


def nvfp4(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    *,
    scale: float = 0.01,
    bias: bool = False,
    scales: tuple[int, int] = (0, 0x7E),
) -> LinearSource:
    """Any codes, and group scales with E4M3 codes in a range."""
    return LinearSource(
        name="mlp.gate_proj",
        format=WeightFormat.NVFP4,
        shape=(rows, columns),
        weight=rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
        group_scales=rng.integers(scales[0], scales[1] + 1, (rows, columns // 16), dtype=np.uint8),
        global_scale=scale,
        bias=rng.normal(size=rows).astype(np.float32) if bias else None,
    )


def fp8(
    rng: np.random.Generator, rows: int, columns: int, *, scale: float = 0.01, bias: bool = False
) -> LinearSource:
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[(codes & 0x7F) == E4M3_NAN] = 0
    return LinearSource(
        name="self_attn.o_proj",
        format=WeightFormat.FP8,
        shape=(rows, columns),
        weight=codes,
        global_scale=scale,
        bias=rng.normal(size=rows).astype(np.float32) if bias else None,
    )


def bf16(rng: np.random.Generator, rows: int, columns: int, *, bias: bool = False) -> LinearSource:
    return LinearSource(
        name="lm_head",
        format=WeightFormat.BF16,
        shape=(rows, columns),
        weight=rng.normal(size=(rows, columns)).astype(ml_dtypes.bfloat16).view(np.uint16),
        bias=rng.normal(size=rows).astype(np.float32) if bias else None,
    )


def reference_weight(source: LinearSource) -> np.ndarray:
    """float64 [N, K]"""
    scale = np.float64(np.float32(source.global_scale))
    if source.format is WeightFormat.BF16:
        return source.weight.view(ml_dtypes.bfloat16).astype(np.float64)
    if source.format is WeightFormat.FP8:
        return source.weight.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    codes = np.empty(source.shape, np.uint8)
    codes[:, 0::2], codes[:, 1::2] = source.weight & 15, source.weight >> 4
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    groups = source.group_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values * np.repeat(groups, 16, axis=1) * scale


def reference_bias(source: LinearSource) -> np.ndarray:
    return np.zeros(source.shape[0]) if source.bias is None else source.bias.astype(np.float64)


def apply(linear: CpuLinear, x: np.ndarray, threads: int = 1) -> np.ndarray:
    """The product, out of and into arrays whose neighbours must stay what they are."""
    tokens, (rows, columns) = len(x), linear.shape
    padded = np.full((tokens + 2, columns), np.nan, np.float32)
    padded[1:-1] = x
    out = np.full((tokens + 2, rows), 7.0, np.float32)
    scratch = np.full((threads + 1, linear.scratch_size), np.nan, np.float32)
    linear.apply(padded[1:-1], out[1:-1], scratch[:-1])
    assert (out[[0, -1]] == 7).all(), "other tokens' rows are left alone"
    assert np.isnan(scratch[-1]).all(), "other threads' scratch is left alone"
    return out[1:-1]


def assert_close(linear: CpuLinear, sources: Sequence[LinearSource], x: np.ndarray, threads: int = 1) -> None:
    """Within the bound of a float32 sum in order (Higham 2002, 3.5): no format may lose anything else."""
    weight = np.concatenate([reference_weight(source) for source in sources])
    bias = np.concatenate([reference_bias(source) for source in sources])
    exact = x.astype(np.float64)
    magnitude = np.abs(exact) @ np.abs(weight.T) + np.abs(bias)
    error = np.abs(apply(linear, x, threads) - (exact @ weight.T + bias))
    np.testing.assert_array_less(error, magnitude * (weight.shape[1] + 4) * 2.0**-24 + 1e-37)


# -- against the reference ---------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn) -> list[LinearSource]:
    """Up to four parts of any format, rows and scale, stacked."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    formats = draw(st.lists(st.sampled_from([nvfp4, fp8, bf16]), min_size=1, max_size=4))
    groups = draw(st.integers(1, 12))
    # Only the groups of NVFP4 ask for a multiple of 16.
    columns = groups * 16 - (0 if nvfp4 in formats else draw(st.integers(0, 15)))
    sources = []
    for make in formats:
        options = {} if make is bf16 else {"scale": 10.0 ** draw(st.integers(-9, 6))}
        rows = draw(st.integers(1, 70))
        sources.append(make(rng, rows, columns, bias=draw(st.booleans()), **options))
    return sources


@given(sources=layers(), tokens=st.integers(1, 20), threads=st.integers(1, 3), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stacked_parts(allocate, sources, tokens, threads, seed):
    linear = load_linear(sources, allocate)
    assert linear.shape == (sum(source.shape[0] for source in sources), sources[0].shape[1])
    x = np.random.default_rng(seed).normal(size=(tokens, linear.shape[1])).astype(np.float32)
    assert_close(linear, sources, x, threads)


@pytest.mark.parametrize("make", [nvfp4, fp8, bf16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 33, 70])
def test_products_that_all_threads_share(allocate, make, tokens):
    rng = np.random.default_rng(tokens)
    source = make(rng, 531, 272, bias=tokens % 2 == 0)
    x = rng.normal(size=(tokens, 272)).astype(np.float32)
    assert_close(load_linear([source], allocate), [source], x, threads=2)


@pytest.mark.parametrize("make", [nvfp4, fp8, bf16])
def test_a_token_does_not_depend_on_the_others_or_on_the_threads(allocate, make):
    rng = np.random.default_rng(3)
    linear = load_linear([make(rng, 700, 192, bias=True)], allocate)
    x = rng.normal(size=(23, 192)).astype(np.float32)
    alone = np.concatenate([apply(linear, x[t : t + 1]) for t in range(len(x))])
    for threads in (1, 2, 3):
        for tokens in range(1, len(x) + 1):
            np.testing.assert_array_equal(apply(linear, x[:tokens], threads), alone[:tokens])


def test_every_code_with_every_scale_is_exact(allocate):
    scales = np.array([code for code in range(256) if code & 0x7F != E4M3_NAN], np.uint8)
    codes = np.arange(16, dtype=np.uint8)
    weight = np.broadcast_to(codes[0::2] | codes[1::2] << 4, (len(scales), 8))
    source = LinearSource(
        "w", WeightFormat.NVFP4, (len(scales), 16), np.ascontiguousarray(weight), scales[:, None]
    )
    expected = reference_weight(source)
    assert (scales[1:8].view(ml_dtypes.float8_e4m3fn).astype(float) < 2.0**-6).all(), "some are subnormal"
    assert (expected[1:8, 1:8] > 0).all(), "and not nothing"
    linear = load_linear([source], allocate)
    # Both ways of holding a token: alone, and beside others.
    np.testing.assert_array_equal(apply(linear, np.eye(16, dtype=np.float32)).T, expected)
    for column in range(16):
        one = np.zeros((1, 16), np.float32)
        one[0, column] = 1
        np.testing.assert_array_equal(apply(linear, one)[0], expected[:, column])


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16])
def test_every_plain_element_is_exact(allocate, dtype):
    if dtype is ml_dtypes.bfloat16:
        codes, weight_format = np.arange(1 << 16, dtype=np.uint16), WeightFormat.BF16
    else:
        codes, weight_format = np.arange(256, dtype=np.uint8), WeightFormat.FP8
    codes = codes[np.isfinite(codes.view(dtype).astype(np.float32))]
    # float32 subnormals may be flushed by who else is in the process
    codes = codes[(codes.view(dtype) == 0) | (np.abs(codes.view(dtype).astype(np.float64)) >= 2.0**-126)]
    linear = load_linear([LinearSource("w", weight_format, (len(codes), 1), codes[:, None])], allocate)
    np.testing.assert_array_equal(
        apply(linear, np.ones((1, 1), np.float32))[0], codes.view(dtype).astype(np.float32)
    )


# -- the traps of the formats ------------------------------------------------------------------------------


def test_each_row_range_keeps_its_own_global_scale(allocate):
    rng = np.random.default_rng(5)
    q = nvfp4(rng, 24, 64, scale=0.011)
    k = nvfp4(rng, 8, 64, scale=0.011 / 2.14)
    v = nvfp4(rng, 9, 64, scale=0.7)
    linear = load_linear([q, k, v], allocate)
    assert len(linear.parts) == 1, "one product, not three"
    x = rng.normal(size=(2, 64)).astype(np.float32)
    assert_close(linear, [q, k, v], x)
    separate = [apply(load_linear([source], allocate), x) for source in (q, k, v)]
    np.testing.assert_array_equal(apply(linear, x), np.concatenate(separate, axis=1))


@pytest.mark.parametrize("tokens", [1, 8])
def test_subnormal_group_scales_count(allocate, tokens):
    rng = np.random.default_rng(6)
    source = nvfp4(rng, 40, 64, scale=1e-4, scales=(1, 7))
    x = np.abs(rng.normal(size=(tokens, 64))).astype(np.float32)
    linear = load_linear([source], allocate)
    assert_close(linear, [source], x)
    assert (apply(linear, x) != 0).all()


@pytest.mark.parametrize("tokens", [1, 8])
def test_sums_beyond_float16_before_the_global_scale(allocate, tokens):
    rng = np.random.default_rng(7)
    source = nvfp4(rng, 33, 256, scale=1e-6, scales=(0x70, 0x7E))
    x = rng.normal(scale=1000, size=(tokens, 256)).astype(np.float32)
    unscaled = np.abs(x.astype(np.float64) @ reference_weight(source).T / 1e-6)
    assert np.median(unscaled) > 65504
    assert_close(load_linear([source], allocate), [source], x)


def test_zero_rows_give_the_bias(allocate):
    rng = np.random.default_rng(8)
    source = nvfp4(rng, 20, 32, bias=True)
    source.weight[3] = 0x80  # both zeros
    source.group_scales[5] = 0
    out = apply(load_linear([source], allocate), rng.normal(size=(3, 32)).astype(np.float32))
    np.testing.assert_array_equal(out[:, [3, 5]], np.broadcast_to(source.bias[[3, 5]], (3, 2)))


@pytest.mark.parametrize("tokens", [1, 5])
def test_nan_stays_in_its_row(allocate, tokens):
    rng = np.random.default_rng(9)
    four, eight = nvfp4(rng, 18, 32), fp8(rng, 18, 32)
    four.group_scales[2, 1] = E4M3_NAN
    four.group_scales[17, 0] = 0x80 | E4M3_NAN
    eight.weight[4, 31] = E4M3_NAN
    out = apply(load_linear([four, eight], allocate), rng.normal(size=(tokens, 32)).astype(np.float32))
    assert set(np.flatnonzero(np.isnan(out).any(axis=0))) == {2, 17, 18 + 4}
    assert np.isnan(out[:, [2, 17, 22]]).all()


# -- memory ------------------------------------------------------------------------------------------------


def test_four_bits_stay_four_bits():
    memory = HostMemoryResource(1 << 24)
    source = nvfp4(np.random.default_rng(10), 512, 256)
    linear = load_linear([source], allocator(memory))
    assert memory.live == linear.nbytes
    assert linear.nbytes == source.weight.nbytes + source.group_scales.nbytes + 512 * 4


def test_all_bytes_come_from_what_is_handed_in_and_go_back():
    memory = HostMemoryResource(1 << 24)
    rng = np.random.default_rng(11)
    linear = load_linear([bf16(rng, 5, 48, bias=True), nvfp4(rng, 5, 48), fp8(rng, 3, 48)], allocator(memory))
    live = memory.live
    assert live == linear.nbytes > 0
    apply(linear, np.ones((9, 48), np.float32), threads=2)
    assert memory.live == live, "a product allocates nothing"
    del linear
    assert memory.live == 0


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_load_that_fails_gives_everything_back(failing):
    memory = HostMemoryResource(1 << 24)
    rng = np.random.default_rng(12)
    sources = [bf16(rng, 5, 48, bias=True), nvfp4(rng, 5, 48), fp8(rng, 3, 48)]
    faulty = FaultInjectingMemoryResource(memory, [Fault(nth=failing)])
    with pytest.raises(OutOfMemoryError):
        load_linear(sources, allocator(faulty))
    assert memory.live == 0


def test_a_bf16_linear_is_its_table(allocate):
    rng = np.random.default_rng(13)
    source = bf16(rng, 33, 24)
    linear = load_linear([source], allocate)
    table = linear.table()
    assert (table.shape, table.dtype) == ((33, 24), DType.BFLOAT16)
    np.testing.assert_array_equal(table.array, source.weight)
    assert linear.nbytes == table.nbytes, "one copy for both"
    table.array[7] = 0
    assert (apply(linear, np.ones((1, 24), np.float32))[0, 7]) == 0


@pytest.mark.parametrize("makes", [[fp8], [nvfp4], [bf16, fp8]])
def test_other_linears_are_no_table(allocate, makes):
    rng = np.random.default_rng(14)
    with pytest.raises(ValueError, match="only a BF16 linear is a table"):
        load_linear([make(rng, 8, 32) for make in makes], allocate).table()


def test_scratch_is_the_largest_linears(allocate):
    rng = np.random.default_rng(15)
    narrow, wide = (load_linear([nvfp4(rng, 8, columns)], allocate) for columns in (32, 4096))
    assert scratch_size([narrow, wide]) == wide.scratch_size > narrow.scratch_size
    assert wide.scratch_size <= 4096 * 8 + 1024, "a tile of tokens, not a copy of the weight"
    assert scratch_size([]) == 0


# -- what is refused ---------------------------------------------------------------------------------------


def test_nvfp4_needs_whole_groups(allocate):
    source = LinearSource("a.b", WeightFormat.NVFP4, (2, 24), np.zeros((2, 12), np.uint8))
    with pytest.raises(CheckpointError, match=r"a\.b: NVFP4 needs columns in groups of 16, not 24"):
        load_linear([source], allocate)


def test_parts_have_the_same_columns(allocate):
    rng = np.random.default_rng(16)
    with pytest.raises(CheckpointError, match="48 columns, its neighbours have 32"):
        load_linear([bf16(rng, 4, 32), nvfp4(rng, 4, 48)], allocate)


@pytest.mark.parametrize(
    ("x", "out", "scratch"),
    [((2, 31), (2, 5), 999), ((2, 32), (3, 5), 999), ((2, 32), (2, 4), 999), ((2, 32), (2, 5), 15)],
)
def test_shapes_are_checked_before_kernels_run(allocate, x, out, scratch):
    linear = load_linear([bf16(np.random.default_rng(17), 5, 32)], allocate)
    with pytest.raises(ValueError, match=r"expected \[T, 32\], \[T, 5\]"):
        linear.apply(np.zeros(x, np.float32), np.zeros(out, np.float32), np.zeros((1, scratch), np.float32))


# -- other machines ----------------------------------------------------------------------------------------


PORTABLE = (
    test_stacked_parts,
    test_every_code_with_every_scale_is_exact,
    test_every_plain_element_is_exact,
    test_nan_stays_in_its_row,
)


@pytest.mark.parametrize("features", ["", "+avx,+avx2,+fma,+f16c"], ids=["baseline", "avx2"])
def test_machines_without_wide_registers(features):
    """What depends on the machine, compiled for one that has less."""
    if features and "+avx2" not in host_features():
        pytest.skip("this machine has no AVX2 to run it")
    here = Path(__file__)
    chosen = [f"{here}::{test.__name__}" for test in PORTABLE] + [str(here.with_name("test_registers.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here.parents[3])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def host_features() -> str:
    from numba.core.registry import cpu_target

    return cpu_target.target_context.codegen().magic_tuple()[2]
