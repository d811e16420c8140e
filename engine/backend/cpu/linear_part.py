"""What the parts of a linear layer have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import LinearSource

__all__ = ["LinearPart", "biases", "row_scales"]


class LinearPart(Protocol):
    """Consecutive rows of a linear layer's weight, all of one format."""

    @property
    def rows(self) -> int:
        """How many."""

    @property
    def tensors(self) -> Sequence[HostTensor]:
        """Everything that is resident."""

    def apply(self, x: np.ndarray, out: np.ndarray, column: int, scratch: np.ndarray) -> None:
        """``x @ W.T + bias`` to the columns of `out` from `column` on; see `CpuLinear.apply`."""


def row_scales(sources: Sequence[LinearSource]) -> np.ndarray:
    """The global scale of each row, float32 [N]."""
    return np.concatenate([np.full(source.shape[0], source.global_scale, np.float32) for source in sources])


def biases(sources: Sequence[LinearSource]) -> np.ndarray:
    """The bias of each row, float32 [N]; empty if none of the sources has one."""
    if all(source.bias is None for source in sources):
        return np.empty(0, np.float32)
    return np.concatenate(
        [np.zeros(source.shape[0], np.float32) if source.bias is None else source.bias for source in sources]
    ).astype(np.float32, copy=False)
