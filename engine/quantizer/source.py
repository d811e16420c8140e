"""A 16- or 32-bit model to quantise: a Hugging Face directory of safetensors, read one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from engine.backend.cpu.planning import CpuLayout
from engine.backend.keeping import KeepingBackend
from engine.backend.planning import PlanningBackend
from engine.backend.protocol import Backend
from engine.errors import CheckpointError, UnsupportedModelError
from engine.memory.resources import PlanningMemoryResource
from engine.model.checkpoint import Checkpoint, StoredTensor
from engine.model.headers import CheckpointHeaders
from engine.model.loader import WeightLoader
from engine.model.registry import model_class
from engine.quantizer.nvfp4 import GROUP_SIZE

__all__ = ["LinearStack", "Source"]

_UNLIMITED = 1 << 60
_FLOATS = ("BF16", "F16", "F32")
_STACKS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
"""linears that engines stack along N: one product, one global scale"""
_LINEAR = re.compile(r"(model\.layers\.\d+)\.(self_attn|mlp)\.(\w+_proj)\.weight")
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)


@dataclass(frozen=True, slots=True)
class LinearStack:
    """Linears with the same input that share a global scale."""

    modules: tuple[str, ...]
    columns: int

    @property
    def quantizable(self) -> bool:
        """Whole groups of 16 along K."""
        return self.columns % GROUP_SIZE == 0


class Source:
    """The checkpoint in `path`, which can be quantised.

    Raises
    ------
    CheckpointError
        A file is missing or damaged.
    UnsupportedModelError
        The model is quantised already, holds other than floats, or its architecture is not served.
    """

    def __init__(self, path: Path) -> None:
        self.checkpoint = Checkpoint.open(path)
        declared = self.config.get("quantization_config")
        if declared is not None or (path / "hf_quant_config.json").exists():
            method = declared.get("quant_method") if isinstance(declared, dict) else None
            raise UnsupportedModelError(
                f"{path}: is quantised already ({method or 'modelopt'}); expected a BF16, FP16 or FP32 model"
            )
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _FLOATS:
                raise UnsupportedModelError(
                    f"{tensor.file}: tensor {name} is {tensor.dtype}; expected BF16, F16 or F32"
                )
        model_class(self.checkpoint.config.architecture)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> dict[str, Any]:
        """config.json as it is written."""
        return self.checkpoint.raw_config

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.checkpoint.tensors

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def check_complete(self) -> None:
        """Load the model with no memory behind it: what is made of a source that is no model is none either.

        Raises
        ------
        CheckpointError
            A tensor that the architecture needs is missing, or contradicts config.json.
        """
        config = self.checkpoint.config
        planning = PlanningBackend(PlanningMemoryResource(_UNLIMITED), CpuLayout(threads=1))
        backend: Any = KeepingBackend(cast(Backend, planning))
        loader = WeightLoader(CheckpointHeaders.of(self.checkpoint), config, backend)
        model_class(config.architecture)(config, loader, backend)

    def stacks(self) -> list[LinearStack]:
        """The decoder layers' linears, in the order in which a layer uses them."""
        found: dict[tuple[str, ...], list[str]] = {}
        for name, info in self.tensors.items():
            match = _LINEAR.fullmatch(name)
            if match and len(info.shape) == 2:
                layer, block, linear = match.groups()
                stack = next((s for b, s in _STACKS if b == block and linear in s), (linear,))
                found.setdefault((layer, block, *stack), []).append(name.removesuffix(".weight"))
        stacks = []
        for key, modules in found.items():
            order = key[2:]
            modules.sort(key=lambda module: order.index(module.rpartition(".")[2]))
            widths = {self.tensors[f"{module}.weight"].shape[1] for module in modules}
            if len(widths) != 1:
                raise CheckpointError(f"{self.path}: {', '.join(modules)} differ in their input features")
            stacks.append(LinearStack(tuple(modules), widths.pop()))
        return sorted(
            stacks, key=lambda stack: [int(p) if p.isdigit() else p for p in stack.modules[0].split(".")]
        )

    def tensor(self, name: str) -> np.ndarray:
        """View of one tensor in its own dtype (`ml_dtypes.bfloat16` for BF16)."""
        values = self.checkpoint.tensor(name)
        return values.view(ml_dtypes.bfloat16) if self.tensors[name].dtype == "BF16" else values

    def weight(self, module: str) -> np.ndarray:
        """A linear's weight, float32 [N, K]. Raises CheckpointError where it holds no number."""
        name = f"{module}.weight"
        values = self.tensor(name).astype(np.float32)
        self.checkpoint.release(name)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.tensors[name].file}: tensor {name} holds infinities or NaN")
        return values

    def bfloat16(self, name: str) -> np.ndarray:
        """A copy of a tensor, rounded to BF16. Raises CheckpointError where it holds no number then."""
        with np.errstate(over="ignore"):
            values = self.tensor(name).astype(ml_dtypes.bfloat16)
        self.checkpoint.release(name)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.tensors[name].file}: tensor {name} holds infinities or NaN in BF16")
        return values

    def companions(self) -> Iterator[Path]:
        """The tokenizer's and other files that a quantised copy needs as they are."""
        seen = set()
        for pattern in _COPIED:
            for file in sorted(self.path.glob(pattern)):
                if file.is_file() and file not in seen:
                    seen.add(file)
                    yield file
