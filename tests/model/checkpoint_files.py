"""Writes and changes safetensors files and model directories, as the format's specification says.

NumPy has no bfloat16 and no FP8, so the library's own writer cannot be used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from engine.model.checkpoint import Checkpoint

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""name -> (safetensors' element type, shape, bytes)"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
    },
}
"""a group of compressed-tensors' configuration"""
LINEARS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
"""of a layer of `CONFIG`, [N, K]"""


def read_tensors(model: Path) -> Tensors:
    checkpoint = Checkpoint.open(model)
    return {
        name: (stored.dtype, stored.shape, checkpoint.tensor(name).tobytes())
        for name, stored in checkpoint.tensors.items()
    }


def write_tensors(file: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    write_file(file, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def write_file(file: Path, header: bytes, body: bytes, length: int | None = None) -> None:
    """`length` is what the file says of its header's, where that is not true."""
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)


def change_tensors(model: Path, change: Callable[[Tensors], object]) -> None:
    tensors = read_tensors(model)
    change(tensors)
    write_tensors(model / "model.safetensors", tensors)


def bfloat16(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return "BF16", values.shape, values.astype(ml_dtypes.bfloat16).tobytes()


def float32(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(values, np.float32)
    return "F32", array.shape, array.tobytes()


def e4m3(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(values, np.float32).astype(ml_dtypes.float8_e4m3fn)
    return "F8_E4M3", array.shape, array.tobytes()


def uint8(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return "U8", values.shape, values.astype(np.uint8).tobytes()


def modelopt_nvfp4(rng: np.random.Generator, module: str, rows: int, cols: int) -> Tensors:
    """A random linear in ModelOpt's NVFP4."""
    return {
        f"{module}.weight": uint8(rng.integers(0, 256, (rows, cols // 2))),
        f"{module}.weight_scale": e4m3(rng.uniform(0.5, 448, (rows, cols // 16))),
        f"{module}.weight_scale_2": float32(1e-4),
        f"{module}.input_scale": float32(0.01),
    }


def fp8_linear(rng: np.random.Generator, module: str, rows: int, cols: int) -> Tensors:
    """A random linear in FP8 with one scale."""
    return {
        f"{module}.weight": e4m3(rng.normal(0, 100, (rows, cols))),
        f"{module}.weight_scale": float32(1e-3),
    }


def dense(rng: np.random.Generator, module: str, rows: int, cols: int) -> Tensors:
    return {f"{module}.weight": bfloat16(rng.normal(0, 0.05, (rows, cols)))}


Make = Callable[[np.random.Generator, str, int, int], Tensors]


def write_model(
    directory: Path,
    config: dict[str, Any] | None = None,
    *,
    linear: Callable[[str], Make] = lambda module: dense,
    more: Tensors | None = None,
) -> Path:
    """A tied model of `CONFIG` with changes, each linear as `linear` of its module makes it."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    norm = bfloat16(np.ones(32))
    tensors = {
        "model.embed_tokens.weight": bfloat16(rng.normal(0, 0.05, (64, 32))),
        "model.norm.weight": norm,
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = norm
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm
        for name, (rows, cols) in LINEARS.items():
            module = f"{prefix}.{name}"
            tensors |= linear(module)(rng, module, rows, cols)
    write_tensors(directory / "model.safetensors", tensors | (more or {}))
    return directory
