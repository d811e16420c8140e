"""A checkpoint of which only JSON files and headers are read: enough to plan a load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import numpy as np

from engine.errors import UnsupportedModelError
from engine.model.checkpoint import Checkpoint
from engine.model.files import text_shown
from engine.model.safetensors_file import StoredTensor, carrier_of

__all__ = ["CheckpointHeaders", "spots"]

_SPOTS = 4
_SPOT_BYTES = 4096


class CheckpointHeaders(Checkpoint):
    """A checkpoint whose tensors have a type and a shape, and zeros for contents that take no memory.

    Only whether two tables are one is looked up in the files, by a few spots of them: it decides how much is
    loaded.
    """

    has_data = False

    @classmethod
    def open(cls, path: Path | str, *, log: logging.Logger | None = None) -> Self:
        """Read the JSON files and the headers of all shards. Raises as `Checkpoint.open` does.

        Parameters
        ----------
        log
            Takes what is odd about the checkpoint; None: nobody does.
        """
        headers = super().open(path)
        headers.log = _unheard() if log is None else log
        return headers

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """The headers of a checkpoint that is open, of which nobody hears what is odd."""
        headers = cls(
            checkpoint.path,
            checkpoint.config,
            checkpoint.raw_config,
            checkpoint.declaration,
            checkpoint.tensors,
        )
        headers.log = _unheard()
        return headers

    def tensor(self, name: str) -> np.ndarray:
        """Zeros of the tensor's shape in the element type's NumPy carrier. Raises as `Checkpoint.tensor`."""
        stored = self.stored(name)
        carrier = carrier_of(stored.dtype)
        if carrier is None:
            raise UnsupportedModelError(
                f"{stored.file}: tensor {text_shown(name)}: element type {stored.dtype} is not served"
            )
        return np.broadcast_to(carrier(0), stored.shape)

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two matrices hold the same in a few spots. Of tables that differ, nearly every row does."""
        return self._spots(self.stored(name)) == self._spots(self.stored(other))

    def release(self, name: str) -> None:
        """Nothing was read."""

    def _spots(self, stored: StoredTensor) -> list[bytes]:
        found = []
        with stored.file.open("rb") as file:
            for begin, end in spots(stored):
                file.seek(begin)
                found.append(file.read(end - begin))
        return found


def _unheard() -> logging.Logger:
    return logging.Logger("unheard", logging.CRITICAL + 1)


def spots(stored: StoredTensor) -> list[tuple[int, int]]:
    """Where `is_equal` looks: ranges of bytes in the tensor's file, from its beginning on."""
    size = min(_SPOT_BYTES, stored.nbytes)
    step = max((stored.nbytes - size) // _SPOTS, 1)
    starts = range(0, stored.nbytes - size + 1, step)[:_SPOTS]
    return [(stored.start + start, stored.start + start + size) for start in starts]
