"""Compiled kernels: what a stored one depends on, and what happens where none can be stored."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.backend.cpu import jit

ENGINE = Path(jit.__file__).parents[2]
LOOK_UP = """
import numpy as np
from engine.backend.cpu import elementwise
table, out = np.full((1, 2), 0x4000, np.uint16), np.empty((1, 2), np.float32)
elementwise.embedding(np.zeros(1, np.int32), table, out)
hits = sum(elementwise.embedding.stats.cache_hits.values())
print(elementwise.__file__, out[0, 0], hits)
"""


def run_in(tree: Path) -> tuple[float, bool]:
    """Look up bfloat16 2.0 with the package in `tree`: what was found, and whether stored code was used."""
    environment = os.environ | {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(tree / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", LOOK_UP], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    source, value, hits = result.stdout.split()
    assert source.startswith(str(tree))
    return float(value), hits == "1"


def test_a_kernel_is_compiled_again_when_what_it_calls_has_changed(tmp_path: Path) -> None:
    shutil.copytree(ENGINE, tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    assert run_in(tmp_path) == (2.0, False)
    assert run_in(tmp_path) == (2.0, True)

    unrelated = tmp_path / "engine/backend/cpu/norm.py"
    unrelated.write_text(unrelated.read_text() + "\n")
    assert run_in(tmp_path) == (2.0, True)

    called = tmp_path / "engine/backend/cpu/floats.py"
    decode = "return uint32(uint32(code) << 16).view(float32)"
    assert decode in called.read_text()
    called.write_text(called.read_text().replace(decode, decode.replace("16", "15")))
    assert run_in(tmp_path) != (2.0, True)
    assert run_in(tmp_path)[0] != 2.0


def test_sources_of_a_kernel() -> None:
    sources = {path.stem for path in jit._sources(jit._PACKAGE / "attention_prefill.py")}
    assert sources >= {"attention_prefill", "attention_past", "registers", "exponential", "floats", "jit"}
    assert not sources & {"backend", "linear", "norm"}


def test_where_nothing_can_be_stored_kernels_work_and_one_warning_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: object) -> None:
        raise RuntimeError(f"cannot cache function {function}: no locator available")

    monkeypatch.setattr(jit, "_KernelCache", refuse)
    jit._warn_uncached.cache_clear()

    def double(x: np.ndarray) -> None:
        for i in range(x.size):
            x[i] *= 2

    with caplog.at_level(logging.WARNING):
        kernels = [jit.kernel()(double) for _ in range(2)]  # two refusals, one warning
    x = np.arange(3.0)
    for kernel in kernels:
        kernel(x)
    assert x.tolist() == [0, 4, 8]
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR can name a directory" in record.getMessage()
    jit._warn_uncached.cache_clear()


def test_a_full_disk_does_not_stop_a_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @jit.kernel()
    def triple(x: float) -> float:
        return 3 * x

    monkeypatch.setattr(triple._cache._cache_file, "save", fail)
    monkeypatch.setattr(triple._cache._cache_file, "load", lambda key: None)
    jit._warn_uncached.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert triple(2.0) == 6.0
    assert len(caplog.records) == 1
    jit._warn_uncached.cache_clear()


def test_dividing_by_zero_gives_infinity() -> None:
    @jit.kernel()
    def divide(a: float, b: float) -> float:
        return a / b

    assert divide(1.0, 0.0) == np.inf
    assert np.isnan(divide(0.0, 0.0))
