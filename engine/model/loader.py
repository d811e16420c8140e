"""Streams a checkpoint's tensors to the device, one layer at a time, each under its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.backend.protocol import Backend, DType, Linear, Tensor
from engine.errors import CheckpointError
from engine.memory.scope import memory_scope
from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.files import text_shown
from engine.model.kv_scales import is_kv_scale, read_kv_scales
from engine.model.quantization import sources
from engine.model.quantization.tensors import read_bfloat16, read_float32

__all__ = ["Progress", "WeightLoader"]

Progress = Callable[[str, int, int], None]
"""Told a label, the bytes done and all bytes"""

_SHOWN = 4


class WeightLoader:
    """What a model asks for its weights. Nothing is held: what was copied to the device is let go.

    Parameters
    ----------
    progress
        Told ``("load", bytes done, all bytes)`` after each tensor.

    Raises
    ------
    CheckpointError
        The configuration declares a quantisation that no tensor is stored in.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        backend: Backend,
        *,
        progress: Progress | None = None,
    ) -> None:
        sources.check_declaration(checkpoint)
        self._checkpoint = checkpoint
        self._config = config
        self._backend = backend
        self._progress = progress
        self._total = checkpoint.nbytes
        self._done = 0
        self._asked: set[str] = set()
        self._kv_scales: list[tuple[float, float]] | None = None

    def has_linear(self, module: str) -> bool:
        """Whether the checkpoint holds a weight of `module`."""
        return sources.has_linear(self._checkpoint, module)

    def missing(self, module: str, said: str) -> CheckpointError:
        """The error for a weight that is not there, though config.json says what promises it."""
        path = self._checkpoint.path
        return CheckpointError(f"{path / 'config.json'}: {said}, but tensor {module}.weight is missing")

    def is_repeated(self, module: str, table: str) -> bool:
        """Whether `module` is stored as a second copy of the embedding table `table`: one of them will do."""
        if not sources.is_same_weight(self._checkpoint, module, table):
            return False
        self._finished([f"{module}.weight"])
        return True

    def linear(self, tag: str, modules: Sequence[str], rows: Sequence[int], cols: int) -> Linear:
        """`modules` stacked along N, ``[sum(rows), cols]``, allocated as ``weights/<tag>``.

        Each keeps its own format and its own global scale.

        Raises
        ------
        CheckpointError
            A tensor is missing or contradicts the shape, or (UnsupportedModelError) its format is not served.
        """
        with memory_scope(f"weights/{tag}"):
            parts = [
                sources.linear_source(self._checkpoint, module, count, cols)
                for module, count in zip(modules, rows, strict=True)
            ]
            linear = self._backend.load_linear(parts)
        del parts
        self._finished(name for module in modules for name in self._checkpoint.below(module))
        return linear

    def vector(self, name: str, length: int) -> Tensor:
        """The float32 copy of a vector of `length`."""
        with memory_scope(f"weights/{name}"):
            values = read_float32(self._checkpoint, name, (length,))
            tensor = self._backend.from_host(values, DType.FLOAT32)
        del values
        self._finished([name])
        return tensor

    def table(self, module: str, shape: tuple[int, int]) -> Tensor:
        """The embedding table of `module`, BFLOAT16 `shape`. FP16 and FP32 are rounded to it."""
        name = f"{module}.weight"
        with memory_scope(f"weights/{module}"):
            values = read_bfloat16(self._checkpoint, name, shape)
            tensor = self._backend.from_host(values, DType.BFLOAT16)
        del values
        self._finished([name])
        return tensor

    def tied_table(self, module: str, shape: tuple[int, int]) -> Linear:
        """The embedding table of `module` as a linear layer, whose bytes `Backend.as_table` gives as a table.

        Raises CheckpointError as `table` does: an embedding that is quantised is no table.
        """
        read_bfloat16(self._checkpoint, f"{module}.weight", shape)
        return self.linear(module, [module], [shape[0]], shape[1])

    def constant(self, name: str, values: np.ndarray) -> Tensor:
        """Float32 `values` that the model computed itself."""
        with memory_scope(f"weights/{name}"):
            return self._backend.from_host(np.ascontiguousarray(values, np.float32), DType.FLOAT32)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """(key, value) scales of a layer's FP8 cache: `read_kv_scales`, read at the first call."""
        if self._kv_scales is None:
            self._kv_scales = read_kv_scales(self._checkpoint)
        return self._kv_scales[layer]

    def finish(self) -> None:
        """Say which tensors the model did not ask for: a layer too many, or a part that it does not have."""
        unused = [
            name
            for name in self._checkpoint.tensors
            if name not in self._asked and not is_kv_scale(name) and not name.endswith("rotary_emb.inv_freq")
        ]
        if unused:
            names = ", ".join(map(text_shown, unused[:_SHOWN]))
            more = f", and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            self._checkpoint.log.warning(
                "%s: %s has no use for %d tensors: %s%s",
                self._checkpoint.path,
                self._config.architecture,
                len(unused),
                names,
                more,
            )

    def _finished(self, names: Iterable[str]) -> None:
        for name in names:
            self._checkpoint.release(name)
            if name not in self._asked:
                self._asked.add(name)
                self._done += self._checkpoint.stored(name).nbytes
        if self._progress is not None:
            self._progress("load", self._done, self._total)
