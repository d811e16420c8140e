from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import pytest

from engine.config import EngineConfig
from engine.devices import choose_device
from engine.errors import ConfigurationError
from engine.memory.resources import HostMemoryResource, PlanningMemoryResource, host_capacity
from tests.memory.cuda.model_driver import GIB, ModelDriver


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> NoReturn:
        raise ConfigurationError("--device cuda: no NVIDIA driver was found")

    monkeypatch.setattr("engine.backend.cuda.requirements.check_device", refuse)


def test_the_cpu_has_the_memory_it_is_given_or_the_hosts() -> None:
    device = choose_device(EngineConfig(model="m", device="cpu", device_memory=123), {})
    memory = device.open_memory()
    assert isinstance(memory, HostMemoryResource)
    assert (device.name, device.capacity, memory.total) == ("cpu", 123, 123)
    assert choose_device(EngineConfig(model="m", device="cpu"), {}).capacity == host_capacity()
    assert device.can_use(memory)
    assert not device.can_use(PlanningMemoryResource(100))


def test_auto_is_the_cpu_where_there_is_no_gpu(no_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine.devices"):
        assert choose_device(EngineConfig(model="m"), {}).name == "cpu"
    assert caplog.messages == ["running on the CPU: --device cuda: no NVIDIA driver was found"]


@pytest.mark.parametrize("allocator", ["malloc", "pool"])
def test_a_gpus_memory_is_the_allocators_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    opening = pytest.importorskip("engine.memory.cuda.opening", reason="cuda-bindings is not installed")
    monkeypatch.setattr("engine.backend.cuda.requirements.check_device", lambda index: 8 * GIB)
    monkeypatch.setattr(opening, "BoundCudaRuntime", lambda device_id: ModelDriver(total=8 * GIB))
    config = EngineConfig(model="m", device="cuda", cuda_allocator=allocator)
    device = choose_device(config, {})
    memory = device.open_memory()
    assert (device.name, device.capacity) == ("cuda", 8 * GIB)
    assert device.can_use(memory)
    assert memory.api == {"malloc": "malloc", "pool": "async"}[allocator]


def test_a_gpu_can_be_had_without_a_home(monkeypatch: pytest.MonkeyPatch, no_home: None) -> None:
    """Its kernels are compiled anew each time."""
    monkeypatch.setattr("engine.backend.cuda.requirements.check_device", lambda index: 8 * GIB)
    monkeypatch.setattr("engine.backend.cuda.compiler.compiler_version", lambda: (13, 0))
    kept: list[Path | None] = []
    monkeypatch.setattr(
        "engine.backend.cuda.backend.CudaBackend", lambda *_, cache_dir, **__: kept.append(cache_dir)
    )
    for environ in ({}, {"VTSERVE_CACHE": "/a"}):
        choose_device(EngineConfig(model="m", device="cuda"), environ).open_backend(HostMemoryResource(1))
    assert kept == [None, Path("/a/kernels")]


def test_a_gpu_that_gives_no_context_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = pytest.importorskip("engine.memory.cuda.opening", reason="cuda-bindings is not installed")
    monkeypatch.setattr("engine.backend.cuda.requirements.check_device", lambda index: 8 * GIB)
    driver = ModelDriver()
    driver.broken = 2
    monkeypatch.setattr(opening, "BoundCudaRuntime", lambda device_id: driver)
    with pytest.raises(ConfigurationError, match=r"^--device cuda: the GPU cannot be used: cudaMemGetInfo: "):
        choose_device(EngineConfig(model="m", device="cuda"), {}).open_memory()


def test_a_gpu_without_a_compiler_is_left_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> NoReturn:
        raise ConfigurationError("--device cuda: NVRTC was not found")

    monkeypatch.setattr("engine.backend.cuda.requirements.check_device", lambda index: 8 * GIB)
    monkeypatch.setattr("engine.backend.cuda.compiler.compiler_version", refuse)
    with caplog.at_level(logging.INFO, "engine.devices"):
        assert choose_device(EngineConfig(model="m"), {}).name == "cpu"
    assert caplog.messages == ["running on the CPU: --device cuda: NVRTC was not found"]
    with pytest.raises(ConfigurationError, match=r"^--device cuda: NVRTC was not found$"):
        choose_device(EngineConfig(model="m", device="cuda"), {})


def test_cuda_that_cannot_be_had_is_refused_in_a_line(no_gpu: None) -> None:
    with pytest.raises(ConfigurationError, match=r"^--device cuda: no NVIDIA driver was found$"):
        choose_device(EngineConfig(model="m", device="cuda"), {})
