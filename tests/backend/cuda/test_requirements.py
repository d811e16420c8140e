"""Without a GPU, with an old driver or no such card: one line that says what was found. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.backend.cuda.requirements import open_device
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
    }

    def answer(name: str) -> object:
        result = answers[name]
        if isinstance(result, Exception):
            raise result
        return result

    for name in answers:
        monkeypatch.setattr(driver, name, lambda *_, name=name: answer(name))
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


def test_a_gpu_that_is_not_there_is_refused_by_its_index(found: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="GPU 3 was asked for, the driver finds 1"):
        open_device(3)
