"""RMS norm, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cpu import backend as backend_module
from engine.backend.cpu.backend import CpuBackend
from engine.backend.protocol import DType

SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 300))


def reference(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight


@given(shape=SHAPES, magnitude=st.sampled_from([1e-4, 1.0, 1e4]), eps=st.sampled_from([1e-6, 1e-5]))
@settings(max_examples=40, deadline=None)
def test_rms_norm(backend: CpuBackend, shape: tuple[int, int], magnitude: float, eps: float) -> None:
    rng = np.random.default_rng(shape[1])
    x = (rng.normal(size=shape) * magnitude).astype(np.float32)
    weight = rng.normal(size=shape[1]).astype(np.float32)
    out = backend.empty(shape, DType.FLOAT32)
    backend.rms_norm(
        backend.from_host(x, DType.FLOAT32), backend.from_host(weight, DType.FLOAT32), eps, out=out
    )
    np.testing.assert_allclose(backend.to_host(out), reference(x, weight, eps), rtol=3e-6, atol=1e-30)


@given(shape=SHAPES)
@settings(max_examples=20, deadline=None)
def test_rms_norm_in_place(backend: CpuBackend, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1])
    x = rng.normal(size=shape).astype(np.float32)
    weight = rng.normal(size=shape[1]).astype(np.float32)
    tensor = backend.from_host(x, DType.FLOAT32)
    backend.rms_norm(tensor, backend.from_host(weight, DType.FLOAT32), 1e-5, out=tensor)
    np.testing.assert_allclose(backend.to_host(tensor), reference(x, weight, 1e-5), rtol=3e-6, atol=1e-30)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("into_delta", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (5, 33), (100, 576), (57, 1001)])
def test_add_rms_norm(backend: CpuBackend, shape: tuple[int, int], into_delta: bool) -> None:
    rng = np.random.default_rng(shape[1])
    residual, delta = rng.normal(size=(2, *shape)).astype(np.float32)
    weight = rng.normal(size=shape[1]).astype(np.float32)
    summed, added = backend.from_host(residual, DType.FLOAT32), backend.from_host(delta, DType.FLOAT32)
    out = added if into_delta else backend.empty(shape, DType.FLOAT32)
    backend.add_rms_norm(summed, added, backend.from_host(weight, DType.FLOAT32), 1e-5, out=out)
    np.testing.assert_array_equal(backend.to_host(summed), residual + delta)
    np.testing.assert_allclose(
        backend.to_host(out), reference(residual + delta, weight, 1e-5), rtol=3e-6, atol=1e-30
    )
    if not into_delta:
        np.testing.assert_array_equal(backend.to_host(added), delta)


def test_a_row_does_not_depend_on_its_neighbours(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on being computed by one thread or several."""
    rng = np.random.default_rng(0)
    residual, delta = rng.normal(size=(2, 120, 576)).astype(np.float32)
    weight = backend.from_host(rng.normal(size=576).astype(np.float32), DType.FLOAT32)

    def normalised(rows: slice, threshold: int) -> np.ndarray:
        monkeypatch.setattr(backend_module, "_SERIAL_ELEMENTS", threshold)
        out = backend.empty(residual[rows].shape, DType.FLOAT32)
        summed, added = (backend.from_host(x[rows], DType.FLOAT32) for x in (residual, delta))
        backend.add_rms_norm(summed, added, weight, 1e-5, out=out)
        return backend.to_host(out)

    together = normalised(slice(None), 0)
    np.testing.assert_array_equal(normalised(slice(None), 1 << 40), together)
    np.testing.assert_array_equal(normalised(slice(77, 78), 1 << 40), together[77:78])
