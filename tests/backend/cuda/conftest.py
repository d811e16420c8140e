"""The device that GPU tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.backend.protocol import LinearSource, StepLimits, WeightFormat
from engine.errors import ConfigurationError

LIMITS = StepLimits(
    max_tokens=4096,
    max_seqs=64,
    max_blocks_per_seq=8192,
    max_logits_rows=64,
    vocab_size=151_936,
    block_size=16,
)


def _widest() -> list[LinearSource]:
    """A layer as wide as any test's. Only its shape is looked at."""
    nothing = np.empty(0, np.uint8)
    return [LinearSource("widest", WeightFormat.NVFP4, (16, 12_288), nothing)]


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A `CudaBackend` that is ready for steps up to `LIMITS`."""
    from engine.backend.cuda.requirements import open_device

    try:
        open_device(0)
    except ConfigurationError as error:
        pytest.skip(f"no CUDA device: {error}")

    from engine.backend.cuda.backend import CudaBackend
    from engine.memory.cuda.device import CudaDeviceAccount, NvmlUsage
    from engine.memory.cuda.resources import CudaMallocMemoryResource
    from engine.memory.cuda.runtime import BoundCudaRuntime

    runtime = BoundCudaRuntime()
    memory = CudaMallocMemoryResource(CudaDeviceAccount(runtime, NvmlUsage()), runtime)
    backend = CudaBackend(memory, cache_dir=tmp_path_factory.mktemp("kernels"))
    backend._linear.load(_widest())  # reserve() makes room for the layers that were loaded
    backend.reserve(LIMITS)
    try:
        yield backend
        backend.synchronize()
    finally:
        backend.close()
    assert memory.live == 0, "the backend and its tests gave back all they took"
