"""What becomes of errors that launches, copies and waits report. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.backend.cuda import device as device_module
from engine.backend.cuda.device import CudaDevice
from engine.errors import DeviceError, DeviceLostError, EngineError
from engine.memory.cuda.device import DeviceHealth

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: vtserve[cuda]")

ILLEGAL = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
INVALID = driver.CUresult.CUDA_ERROR_INVALID_VALUE


class Builder:
    """What captures a stream of a device that does not exist, and the graph that comes of it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.closed = 0

    def begin_building(self) -> Builder:
        return self

    def end_building(self) -> Builder:
        return self

    def complete(self, options: Any) -> Builder:
        assert options.upload_stream is self._stream
        if self._stream.error is not None:
            raise self._stream.error
        return self

    def launch(self, stream: Stream) -> None:
        assert stream is self._stream
        if self._stream.error is not None:
            raise self._stream.error

    def close(self) -> None:
        self.closed += 1


class Stream:
    """A stream of a device that does not exist."""

    handle = 1
    is_closed = False

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.closed = 0

    def record(self, event: object) -> object:
        if self.error is not None:
            raise self.error
        return object()

    def create_graph_builder(self) -> Builder:
        self.builder = Builder(self)
        return self.builder

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    found = SimpleNamespace(
        compute_capability=SimpleNamespace(major=9, minor=0),
        properties=SimpleNamespace(multiprocessor_count=132, max_shared_memory_per_block_optin=232_448),
        create_stream=Stream,
    )
    monkeypatch.setattr(device_module, "open_device", lambda index: found)
    return CudaDevice(0, None)


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What every call of the driver returns, and how many there were."""
    answer = SimpleNamespace(value=driver.CUresult.CUDA_SUCCESS, calls=0)

    def call(*arguments: Any) -> tuple[Any]:
        answer.calls += 1
        return (answer.value,)

    for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuStreamSynchronize"):
        monkeypatch.setattr(driver, name, call)
    return answer


CALLS = {
    "copy to the device": lambda device: device.copy_to_device(1, 2, 3),
    "copy to the host": lambda device: device.copy_to_host(1, 2, 3),
    "clearing": lambda device: device.clear(1, 3),
    "waiting": lambda device: device.synchronize(),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_that_leaves_the_context_sound(
    device: CudaDevice, status: SimpleNamespace, call: str
) -> None:
    status.value = INVALID
    with pytest.raises(DeviceError, match=f"{call}.*CUDA_ERROR_INVALID_VALUE") as caught:
        CALLS[call](device)
    assert not isinstance(caught.value, DeviceLostError)
    assert isinstance(caught.value, EngineError)
    assert caught.value.code == int(INVALID)
    status.value = driver.CUresult.CUDA_SUCCESS
    CALLS[call](device)
    assert not device.is_lost


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_context_is_asked_nothing_more(device: CudaDevice, status: SimpleNamespace, call: str) -> None:
    status.value = ILLEGAL
    with pytest.raises(DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        CALLS[call](device)
    assert caught.value.code == int(ILLEGAL)
    assert device.is_lost
    for again in CALLS.values():
        with pytest.raises(DeviceLostError, match="a new process is needed"):
            again(device)
    with pytest.raises(DeviceLostError):
        device.record()
    assert status.calls == 1
    device.close()
    assert device.stream.closed == 0


def test_an_error_that_cuda_core_raises(device: CudaDevice) -> None:
    stream: Any = device.stream
    stream.error = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel, …")
    with pytest.raises(DeviceLostError, match="recording an event failed"):
        device.record()
    assert device.is_lost


def test_what_is_no_error_of_cudas_passes(device: CudaDevice) -> None:
    stream: Any = device.stream
    stream.error = TypeError("not a stream")
    with pytest.raises(TypeError, match="not a stream"):
        device.record()
    assert not device.is_lost


def test_a_loss_that_the_memory_found_is_the_backends_too(
    device: CudaDevice, status: SimpleNamespace
) -> None:
    from engine.memory.cuda.runtime import CudaCallError

    health: DeviceHealth = device.health
    health.note(CudaCallError("cudaMemGetInfo", int(ILLEGAL), "an illegal memory access was encountered"))
    with pytest.raises(DeviceLostError, match="cudaMemGetInfo: an illegal memory access"):
        device.synchronize()
    assert status.calls == 0


# -- graphs ------------------------------------------------------------------------------------------------


def test_what_is_captured_goes_to_the_builder(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = []
    monkeypatch.setattr("cuda.core.launch", lambda queue, *arguments: queues.append(queue))
    kernel: Any = object()
    graph, result = device.capture(lambda: device.launch(kernel, (1,), 32))
    device.launch(kernel, (1,), 32)
    stream: Any = device.stream
    assert result is None
    assert graph is stream.builder
    assert queues == [stream.builder, stream]
    device.launch_graph(graph)


def test_no_memory_for_a_graph_is_told_by_its_code(device: CudaDevice) -> None:
    stream: Any = device.stream
    stream.error = RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed because …")
    with pytest.raises(DeviceError, match="capturing a graph failed") as caught:
        device.capture(lambda: 1)
    assert device_module.is_out_of_memory(caught.value)
    assert stream.builder.closed == 1
    assert not device.is_lost


def test_after_a_capture_that_threw_kernels_go_to_the_stream(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = []
    monkeypatch.setattr("cuda.core.launch", lambda queue, *arguments: queues.append(queue))

    def fail() -> None:
        raise ValueError("not enough rows")

    with pytest.raises(ValueError, match="not enough rows"):
        device.capture(fail)
    stream: Any = device.stream
    assert stream.builder.closed == 1
    kernel: Any = object()
    device.launch(kernel, (1,), 32)
    assert queues == [stream]


def test_a_loss_in_a_graph_is_a_loss(device: CudaDevice, status: SimpleNamespace) -> None:
    graph, _ = device.capture(lambda: 1)
    stream: Any = device.stream
    stream.error = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel, …")
    with pytest.raises(DeviceLostError, match="a graph launch failed"):
        device.launch_graph(graph)
    closed = stream.builder.closed
    device.close_graphs([graph])
    assert (status.calls, stream.builder.closed) == (0, closed), "CUDA is asked nothing more"


def test_graphs_are_closed_when_the_device_is_done(device: CudaDevice, status: SimpleNamespace) -> None:
    graph, _ = device.capture(lambda: 1)
    stream: Any = device.stream
    closed = stream.builder.closed
    device.close_graphs([graph])
    assert (status.calls, stream.builder.closed) == (1, closed + 1)
