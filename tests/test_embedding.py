"""The examples of docs/EMBEDDING.md, run as they stand; and the dashboard's figures are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.metrics import ServerMetrics
from app.serving_engine import EngineState

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = re.findall(
    r"^## (.+?)\n.*?^```python\n(.*?)^```", (ROOT / "docs" / "EMBEDDING.md").read_text(), re.M | re.S
)


def run(title: str, folder: Path, model: Path) -> None:
    [code] = [code for name, code in EXAMPLES if name == title]
    exec(compile(code, title, "exec"), {"MODEL": model, "FOLDER": folder})


def test_there_are_four() -> None:
    assert len(EXAMPLES) == 4


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


@pytest.mark.gpu
def test_cupy(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    run("CuPy through the same trace", tmp_path, tmp_path)


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
