"""``vtserve doctor`` on this machine, and on worse ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import doctor
from app.doctor import State, examine

ROOT = Path(__file__).resolve().parents[3]


def by_name(environ: dict[str, str]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in examine(environ)}


def test_this_machine(tmp_path: Path) -> None:
    environ = {**os.environ, "VTSERVE_CACHE": str(tmp_path / "new" / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=60,
    )
    facts = {fact["name"]: fact for fact in json.loads(done.stdout)}
    assert sys.version.split()[0] in facts["Python"]["what"]
    assert facts["Python"]["state"] == facts["CPU"]["state"] == "ok"
    assert str(tmp_path / "new" / "cache") in facts["model cache"]["what"]
    assert facts["model cache"]["state"] == "ok"
    assert not (tmp_path / "new").exists(), "it only looks"
    assert done.returncode == any(fact["state"] == "broken" for fact in facts.values())
    assert all(fact["advice"] for fact in facts.values() if fact["state"] == "broken")


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    finding = by_name({**os.environ, "VTSERVE_CACHE": str(file / "cache")})["model cache"]
    assert finding.state is State.BROKEN
    assert "VTSERVE_CACHE" in finding.advice


def test_no_home(no_home: None) -> None:
    found = by_name({"TMPDIR": "/tmp"})
    for name, variable in (("model cache", "VTSERVE_CACHE"), ("hub cache", "HF_HOME")):
        assert (found[name].state, found[name].what) == (State.BROKEN, "no home directory")
        assert variable in found[name].advice
    assert found["failure records"].what.startswith(f"/tmp/vtserve-{os.getuid()}/failures, ")
    assert "CPU kernels" in found, "not the finding of a check that threw"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FREE", 1 << 60)
    finding = by_name({**os.environ, "VTSERVE_CACHE": str(tmp_path)})["model cache"]
    assert finding.state is State.MISSING
    assert "make room" in finding.advice


def test_what_nobody_thought_of_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("the\nkernel lies")

    monkeypatch.setattr(doctor, "host_capacity", broken)
    finding = by_name(dict(os.environ))["cpu"]
    assert finding.state is State.BROKEN
    assert finding.what == "RuntimeError: the kernel lies"
