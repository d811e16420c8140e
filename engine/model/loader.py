"""Streams a checkpoint's tensors to the device, one layer at a time, each under its own name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from engine.backend.protocol import Backend, DType, Linear, Tensor
from engine.memory.scope import memory_scope
from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.quantization import sources

__all__ = ["WeightLoader"]

_log = logging.getLogger("vtserve")

Progress = Callable[[str, int, int], None]


class WeightLoader:
    """What a model asks for its weights. Nothing is held: what was copied to the device is let go.

    Parameters
    ----------
    progress
        Told ``("load", bytes done, all bytes)`` after each tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        backend: Backend,
        *,
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._backend = backend
        self._progress = progress
        self._total = checkpoint.nbytes
        self._done = 0
        self._said_scales = False

    def has_linear(self, module: str) -> bool:
        """Whether the checkpoint holds a weight of `module`."""
        return sources.has_linear(self._checkpoint, module)

    def linear(self, tag: str, modules: Sequence[str], rows: Sequence[int], cols: int) -> Linear:
        """`modules` stacked along N, ``[sum(rows), cols]``, allocated as ``weights/<tag>``."""
        with memory_scope(f"weights/{tag}"):
            parts = [
                sources.linear_source(self._checkpoint, module, count, cols)
                for module, count in zip(modules, rows, strict=True)
            ]
            linear = self._backend.load_linear(parts)
        del parts
        for module in modules:
            self._finished(sources.linear_tensors(self._checkpoint, module))
        return linear

    def vector(self, name: str, length: int) -> Tensor:
        """The float32 copy of a vector of `length`."""
        with memory_scope(f"weights/{name}"):
            values = sources.read_float32(self._checkpoint, name, (length,))
            tensor = self._backend.from_host(values, DType.FLOAT32)
        self._finished([name])
        return tensor

    def table(self, module: str, shape: tuple[int, int]) -> Tensor:
        """The embedding table of `module`, BFLOAT16 `shape`."""
        name = f"{module}.weight"
        with memory_scope(f"weights/{module}"):
            values = sources.read_bfloat16(self._checkpoint, name, shape)
            tensor = self._backend.from_host(values, DType.BFLOAT16)
        self._finished([name])
        return tensor

    def constant(self, name: str, values: np.ndarray) -> Tensor:
        """Float32 `values` that the model computed itself."""
        with memory_scope(f"weights/{name}"):
            return self._backend.from_host(np.ascontiguousarray(values, np.float32), DType.FLOAT32)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """(k, v) scales of a layer's FP8 cache. One present serves both; none is 1.0, with one warning."""
        prefix = f"model.layers.{layer}.self_attn"
        found: dict[str, float] = {}
        for which in "kv":
            for name in (f"{prefix}.{which}_proj.{which}_scale", f"{prefix}.{which}_scale"):
                if name in self._checkpoint:
                    found[which] = sources.read_scalar(self._checkpoint, name)
        if not self._said_scales:
            self._said_scales = True
            if found:
                count = sum(
                    name.endswith((".k_scale", ".v_scale")) for name in self._checkpoint.tensors
                )
                _log.info("FP8 KV cache: %d scales in the checkpoint", count)
            else:
                _log.warning("FP8 KV cache: the checkpoint has no scales; 1.0 is used for every layer")
        key = found.get("k", found.get("v", 1.0))
        return key, found.get("v", key)

    def _finished(self, names: Sequence[str]) -> None:
        for name in names:
            self._checkpoint.release(name)
            self._done += self._checkpoint.stored(name).nbytes
        if self._progress is not None:
            self._progress("load", min(self._done, self._total), self._total)
