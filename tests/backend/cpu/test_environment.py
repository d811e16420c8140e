"""What the environment says of numba, before numba sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backend.cpu.environment import check_environment
from engine.errors import ConfigurationError


@pytest.mark.parametrize("value", ["1", "4", " 2 ", "4096"])
def test_numbers_of_threads_are_let_pass(value: str) -> None:
    check_environment({"NUMBA_NUM_THREADS": value})
    check_environment({})


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "1.5", "4097", "9" * 5000, "²"])
def test_what_numba_cannot_have_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^NUMBA_NUM_THREADS=.{2,64}: expected a") as caught:
        check_environment({"NUMBA_NUM_THREADS": value})
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("command", ["plan", "generate"])
@pytest.mark.parametrize("value", ["0", "x"])
def test_a_command_says_so_in_a_line(
    command: str, value: str, shared_checkpoints: Path, tmp_path: Path
) -> None:
    model = str(shared_checkpoints / "qwen2" / "NVFP4-modelopt")
    arguments = [model] if command == "plan" else ["--model", model, "--prompt", "a"]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", command, *arguments, "--device", "cpu"],
        env=os.environ | {"NUMBA_NUM_THREADS": value, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "NUMBA_NUM_THREADS" in line]
    assert lines
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
