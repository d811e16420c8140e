"""The sampling kernel's parameters, read back as C lays them out."""

from __future__ import annotations

import ctypes

import numpy as np

from engine.backend.cuda.sampling import on_device, pack_rows, row_bytes
from engine.sampler import SamplingRow
from engine.sampling_params import SamplingParams

NOTHING = np.empty(0, np.int32)


class Row(ctypes.Structure):
    """`Row` of kernels/sampling.cu, field for field."""

    _fields_ = (
        ("key", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("inverse_temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int),
        ("index", ctypes.c_int),
        ("greedy", ctypes.c_int),
    )


def row(key: int = 1, position: int = 7, **params: object) -> SamplingRow:
    return SamplingRow("r", SamplingParams(**params), key, position, NOTHING, NOTHING)  # type: ignore[arg-type]


def packed(rows: list[SamplingRow], indices: list[int]) -> list[Row]:
    out = bytearray(row_bytes(len(indices)))
    pack_rows(rows, indices, out=memoryview(out))
    assert not any(out[len(indices) * ctypes.sizeof(Row) :]), "the results' part is not written"
    return list((Row * len(indices)).from_buffer(out))


def test_rows_are_packed_as_the_kernel_reads_them() -> None:
    sampled = row(2**64 - 1, 2**40, temperature=0.5, top_p=0.25, min_p=0.125, top_k=9)
    first, second = packed([row(temperature=0.0), row(temperature=1.0, top_k=-1), sampled], [0, 2])
    assert (first.index, first.greedy, first.inverse_temperature) == (0, 1, 0)
    assert (first.key, first.position) == (1, 7)
    assert (second.key, second.position) == (2**64 - 1, 2**40)
    assert (second.inverse_temperature, second.top_p, second.min_p) == (2.0, 0.25, 0.125)
    assert (second.top_k, second.index, second.greedy) == (9, 2, 0)


def test_all_tokens_are_top_k_zero() -> None:
    assert packed([row(top_k=-1)], [0])[0].top_k == 0


def test_a_tiny_temperature_stays_a_number() -> None:
    (parameters,) = packed([row(temperature=1e-300)], [0])
    assert np.isfinite(parameters.inverse_temperature)
    assert parameters.greedy == 0


def test_rows_that_want_more_than_a_token_are_the_hosts() -> None:
    assert on_device(row(temperature=0.7, top_p=0.9))
    for params in ({"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}):
        assert not on_device(row(**params))
