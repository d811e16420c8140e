"""Without a GPU, with an old driver or no such card: one line that says what was found. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.backend.cuda.requirements import check_device, open_device
from engine.config import EngineConfig
from engine.devices import choose_device
from engine.errors import ConfigurationError

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: vtserve[cuda]")


class Status(SimpleNamespace):
    """A CUresult."""

    def __int__(self) -> int:
        return int(self.value)


SUCCESS = Status(value=0, name="CUDA_SUCCESS")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the driver answers; a test changes it."""
    answers: dict[str, object] = {
        "cuDriverGetVersion": (SUCCESS, 13_020),
        "cuInit": (SUCCESS,),
        "cuDeviceGetCount": (SUCCESS, 1),
        "cuDeviceGet": (SUCCESS, 0),
        "cuDeviceTotalMem": (SUCCESS, 8 << 30),
        "cuDeviceGetAttribute": (8, 0),
    }

    def answer(name: str, *arguments: object) -> object:
        result = answers[name]
        if name == "cuDeviceGetAttribute":
            major = arguments[0] is driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            return SUCCESS, result[0 if major else 1]
        if isinstance(result, Exception):
            raise result
        return result

    for name in answers:
        monkeypatch.setattr(driver, name, lambda *arguments, name=name: answer(name, *arguments))
    return answers


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            {"cuDriverGetVersion": RuntimeError("libcuda.so.1 is missing")},
            r"no NVIDIA driver was found \(libcuda",
        ),
        ({"cuDriverGetVersion": (SUCCESS, 12_080)}, r"the driver knows CUDA 12\.8, 13\.0 or newer is needed"),
        (
            {"cuInit": (Status(value=100, name="CUDA_ERROR_NO_DEVICE"),)},
            "no usable GPU .CUDA_ERROR_NO_DEVICE",
        ),
        ({"cuDeviceGetCount": (SUCCESS, 0)}, "GPU 0 was asked for, the driver finds 0"),
        ({"cuDeviceGetAttribute": (7, 5)}, r"the GPU has compute capability 7\.5, 8\.0 or newer is needed"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    found: dict[str, object], answers: dict[str, object], message: str
) -> None:
    found.update(answers)
    with pytest.raises(ConfigurationError, match=message) as raised:
        open_device(0)
    text = str(raised.value)
    assert text.startswith("--device cuda: ")
    assert "\n" not in text


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_that_will_do_has_its_bytes_told(found: dict[str, object], capability: tuple[int, int]) -> None:
    found["cuDeviceGetAttribute"] = capability
    assert check_device(0) == 8 << 30


@pytest.mark.parametrize(
    "answers",
    [
        {"cuDriverGetVersion": RuntimeError("libcuda.so.1 is missing")},
        {"cuDriverGetVersion": (SUCCESS, 12_080)},
        {"cuDeviceGetAttribute": (7, 5)},
    ],
)
def test_auto_takes_the_cpu_and_cuda_ends_in_the_line(
    found: dict[str, object], answers: dict[str, object]
) -> None:
    found.update(answers)
    assert choose_device(EngineConfig(model="m"), {}).name == "cpu"
    with pytest.raises(ConfigurationError, match=r"^--device cuda: "):
        choose_device(EngineConfig(model="m", device="cuda"), {})


def test_a_gpu_that_is_not_there_is_refused_by_its_index(found: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="GPU 3 was asked for, the driver finds 1"):
        open_device(3)
