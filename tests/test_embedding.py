"""The examples of docs/EMBEDDING.md, run as they stand; and the dashboard's figures are there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.metrics import ServerMetrics
from app.serving_engine import EngineState
from engine.backend.cuda.requirements import open_device
from engine.errors import ConfigurationError
from engine.memory.errors import OutOfMemoryError
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import allocation_helper

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = re.findall(
    r"^## (.+?)\n.*?^```python\n(.*?)^```", (ROOT / "docs" / "EMBEDDING.md").read_text(), re.M | re.S
)


def run(title: str, folder: Path, model: Path) -> dict[str, Any]:
    [code] = [code for name, code in EXAMPLES if name == title]
    namespace = {"MODEL": model, "FOLDER": folder}
    exec(compile(code, title, "exec"), namespace)
    return namespace


def test_there_are_five() -> None:
    assert len(EXAMPLES) == 5


def test_own_memory(shared_checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("Your own memory under the engine", tmp_path, shared_checkpoints / "qwen2" / "NVFP4-modelopt")
    said = capsys.readouterr().out
    assert re.match(r"\[\d+, \d+, \d+, \d+\]\n", said)
    assert "kv/" in said


def test_own_trace_and_its_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("A trace of your own allocations", tmp_path, tmp_path)
    said = capsys.readouterr()
    assert "#1 size=4.0 MiB" in said.err
    assert "workspace" in said.out
    run("Reading the flight recorder from another process", tmp_path, tmp_path)
    said = capsys.readouterr()
    assert said.out.startswith("2 records of a host device, 0 overwritten\nworkspace/my_buffer 4194304 ")
    assert said.out.endswith("every request was answered\n")


@pytest.fixture
def gpu() -> None:
    try:
        open_device(0)
    except ConfigurationError as error:
        pytest.skip(f"no CUDA device: {error}")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_cupy(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    run("CuPy through the same trace", tmp_path, tmp_path)


NUMBA = "numba's device arrays through the same trace"


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_numba(tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    run(NUMBA, tmp_path, tmp_path)


class NumbaContext:
    """A context of numba's, as far as an array's memory needs one."""

    def __init__(self, manager: Callable[..., Any]) -> None:
        self.memalloc = manager(context=self).memalloc


class WatchedHost(HostMemoryResource):
    """The host's memory, and where it put what was asked for."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.pointers: list[int] = []

    def acquire(self, size: int, stream: Any) -> int:
        self.pointers.append(super().acquire(size, stream))
        return self.pointers[-1]


def test_numba_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """numba's own arrays and pointers over the host's memory: nobody looks into them."""
    cuda = pytest.importorskip("numba.cuda", reason="numba has no CUDA target: numba-cuda is not installed")
    from numba.cuda.cudadrv import devicearray, devices, driver

    memory = WatchedHost()
    pointers: list[int] = []

    @allocation_helper
    def device_array(length: int, dtype: str) -> Any:
        context = NumbaContext(driver._memory_manager)
        monkeypatch.setattr(devices, "get_context", lambda: context)
        array = devicearray.DeviceNDArray((length,), (np.dtype(dtype).itemsize,), dtype)
        pointers.append(array.gpu_data.device_pointer_value)
        return array

    monkeypatch.setattr("engine.memory.cuda.opening.open_cuda_memory", lambda: memory)
    monkeypatch.setattr(driver, "_memory_manager", None)
    monkeypatch.setattr(cuda, "device_array", device_array)
    example = run(NUMBA, tmp_path, tmp_path)

    said = capsys.readouterr().out
    site = re.escape(NUMBA.replace(" ", "?"))
    assert re.search(rf"#1 size=4\.0 MiB .* tag=other/numba site={site}:\d+$", said.strip()), said
    assert pointers == memory.pointers
    assert memory.live == 0
    manager = example["TracedMemoryManager"](context=None)
    assert tuple(manager.get_memory_info()) == (1 << 30, 1 << 30)
    with pytest.raises(OutOfMemoryError, match="out of memory"):
        manager.memalloc(2 << 30)


class IdleEngine:
    """What the figures are made of."""

    state = EngineState.READY
    restarts = 0
    stats = None

    def ledger(self) -> dict[str, object]:
        overheads = ("pool_slack", "rounding", "context", "library", "other_processes", "bypass", "residual")
        return {"segments": {"kv": 1}, "total": 2, "free": 1, **dict.fromkeys(overheads, 0)}

    def alloc_failures(self) -> dict[str, int]:
        return {"full": 1}


def test_the_dashboard_asks_for_figures_that_there_are() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 10
    documented = (ROOT / "docs" / "HTTP.md").read_text()
    served = ServerMetrics(IdleEngine(), "m").render().decode()  # type: ignore[arg-type]
    for query in queries:
        for name in re.findall(r"\b(?:vllm:|vtserve_)\w+", query):
            base = re.sub(r"_(bucket|sum|count|total)$", "", name)
            assert base in documented, name
            # The engine's own figures are there once it has stepped.
            assert base in served or "num_" in base or "cache" in base, name
