"""A 16- or 32-bit model to quantise: a Hugging Face directory of safetensors, read one tensor at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # registers bfloat16 with NumPy, which safetensors asks for by name
import numpy as np
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError, UnsupportedModelError
from engine.quantizer.nvfp4 import GROUP_SIZE

__all__ = ["LinearStack", "Source", "TensorInfo"]

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
class TensorInfo:
    """Where a tensor is."""

    file: Path
    dtype: str
    """safetensors' name: BF16, F16, F32"""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * (4 if self.dtype == "F32" else 2)


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
    """The checkpoint in `path`: its config.json and its tensors.

    Raises
    ------
    CheckpointError
        A file is missing or damaged.
    UnsupportedModelError
        The model is quantised already, or holds integers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        declared = self.config.get("quantization_config")
        if declared is not None or (path / "hf_quant_config.json").exists():
            method = declared.get("quant_method") if isinstance(declared, dict) else None
            raise UnsupportedModelError(
                f"{path}: is quantised already ({method or 'modelopt'}); expected a BF16, FP16 or FP32 model"
            )
        self._tensors = {name: info for file in self._files() for name, info in _list_tensors(file)}
        for name, info in self._tensors.items():
            if info.dtype not in _FLOATS:
                raise UnsupportedModelError(
                    f"{info.file}: tensor {name} is {info.dtype}; expected BF16, F16 or F32"
                )

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    @property
    def dtypes(self) -> set[str]:
        return {info.dtype for info in self._tensors.values()}

    def stacks(self) -> list[LinearStack]:
        """The decoder layers' linears, in the order in which a layer uses them."""
        found: dict[tuple[str, ...], list[str]] = {}
        for name, info in self._tensors.items():
            match = _LINEAR.fullmatch(name)
            if match and len(info.shape) == 2:
                layer, block, linear = match.groups()
                stack = next((s for b, s in _STACKS if b == block and linear in s), (linear,))
                found.setdefault((layer, block, *stack), []).append(name.removesuffix(".weight"))
        stacks = []
        for key, modules in found.items():
            order = key[2:]
            modules.sort(key=lambda module: order.index(module.rpartition(".")[2]))
            widths = {self._tensors[f"{module}.weight"].shape[1] for module in modules}
            if len(widths) != 1:
                raise CheckpointError(f"{self.path}: {', '.join(modules)} differ in their input features")
            stacks.append(LinearStack(tuple(modules), widths.pop()))
        return sorted(
            stacks, key=lambda stack: [int(p) if p.isdigit() else p for p in stack.modules[0].split(".")]
        )

    def tensor(self, name: str) -> np.ndarray:
        """A copy of one tensor in its own dtype (`ml_dtypes.bfloat16` for BF16)."""
        info = self._tensors[name]
        try:
            with safe_open(info.file, framework="np") as file:
                array: np.ndarray = file.get_tensor(name)
        except (SafetensorError, OSError, TypeError) as error:
            raise CheckpointError(
                f"{info.file}: tensor {name} cannot be read: {' '.join(str(error).split())}"
            ) from None
        return array

    def weight(self, module: str) -> np.ndarray:
        """A linear's weight, float32 [N, K]. Raises CheckpointError where it holds no number."""
        values = self.tensor(f"{module}.weight").astype(np.float32)
        if not np.isfinite(values).all():
            info = self._tensors[f"{module}.weight"]
            raise CheckpointError(f"{info.file}: tensor {module}.weight holds infinities or NaN")
        return values

    def bfloat16(self, name: str) -> np.ndarray:
        """A tensor rounded to BF16."""
        return self.tensor(name).astype(ml_dtypes.bfloat16)

    def companions(self) -> Iterator[Path]:
        """The tokenizer's and other files that a quantised copy needs as they are."""
        seen = set()
        for pattern in _COPIED:
            for file in sorted(self.path.glob(pattern)):
                if file.is_file() and file not in seen:
                    seen.add(file)
                    yield file

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if not index.exists():
            if not single.exists():
                raise CheckpointError(f"{self.path}: neither {single.name} nor {index.name} is there")
            return [single]
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index}: {name!r} is not the name of a file beside it")
        return [self.path / name for name in names]


def _list_tensors(path: Path) -> list[tuple[str, TensorInfo]]:
    try:
        with safe_open(path, framework="np") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - no mapping
            return [(name, TensorInfo(path, s.get_dtype(), tuple(s.get_shape()))) for name, s in slices]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file: {' '.join(str(error).split())}"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object")
    return content
