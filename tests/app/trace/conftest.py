"""Fixtures of the trace tools' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.app.trace.making import MIB, TraceMaker


@pytest.fixture
def make_trace(tmp_path: Path) -> Iterator[Callable[..., TraceMaker]]:
    makers: list[TraceMaker] = []

    def make(name: str = "engine.trace", **options: int) -> TraceMaker:
        makers.append(TraceMaker(tmp_path / name, **options))
        return makers[-1]

    yield make
    for maker in makers:
        maker.free(*list(maker.buffers))
        maker.close()


@pytest.fixture
def loaded(make_trace: Callable[..., TraceMaker]) -> SimpleNamespace:
    """A load that runs out of memory: its file, and what is known of it.

    #1 kv 100, #2 layer 0 30, #3 scratch 50 (freed), #4 layer 1 40, #5 scratch 20 (freed), #6 fails.
    """
    maker = make_trace(capacity=200 * MIB)
    maker.allocate("kv", 100 * MIB, "kv")
    maker.allocate("w0", 30 * MIB, "weights/model.layers.0.mlp")
    maker.elsewhere("s0", 50 * MIB, "repack/model.layers.0.mlp")
    maker.free("s0")
    maker.allocate("w1", 40 * MIB, "weights/model.layers.1.mlp")
    maker.elsewhere("s1", 20 * MIB, "repack/model.layers.1.mlp")
    maker.free("s1")
    maker.fail(64 * MIB, "workspace")
    return SimpleNamespace(path=maker.close(), peak=190 * MIB, live=170 * MIB, maker=maker)
