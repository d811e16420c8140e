"""A CPU backend to test, over memory that must be whole again in the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from engine.backend.cpu import backend as backend_module
from engine.backend.cpu.backend import CpuBackend
from engine.backend.protocol import StepLimits
from engine.memory.resources import HostMemoryResource

LIMITS = StepLimits(
    max_tokens=512, max_seqs=16, max_blocks_per_seq=512, max_logits_rows=64, vocab_size=1000, block_size=16
)


@pytest.fixture(scope="session")
def memory() -> Iterator[HostMemoryResource]:
    """Host memory; every byte must be back when the session ends."""
    memory = HostMemoryResource(1 << 30)
    yield memory
    gc.collect()
    assert memory.live == 0, "the backends and their tests gave back all they took"


@pytest.fixture(scope="session")
def backend(memory: HostMemoryResource) -> Iterator[CpuBackend]:
    """A backend that is ready for steps up to `LIMITS`."""
    backend = CpuBackend(memory)
    backend.reserve(LIMITS)
    yield backend
    backend.close()


@pytest.fixture(params=["one thread", "all threads"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Element-wise operations on one thread or on all, however small they are."""
    threshold = 0 if request.param == "all threads" else 1 << 40
    monkeypatch.setattr(backend_module, "_SERIAL_ELEMENTS", threshold)
    return str(request.param)
