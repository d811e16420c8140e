"""Checkpoints of any size that take no room: true headers over holes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from benchmarks.gpu_reference_run import LARGE, SIZES, tensors

__all__ = ["LARGE", "write_sparse_checkpoint"]


def write_sparse_checkpoint(directory: Path, shape: dict[str, int] | None = None) -> int:
    """The model of `benchmarks/gpu_reference_run.py` without its weights; returns the bytes it seems to have.

    64 layers, hidden 5120, intermediate 17408, 40 heads and 8 KV heads of 128, vocabulary 151,936, NVFP4 in
    the MLP, FP8 in attention, tables in BF16, if no other `shape` is given.
    """
    shape = LARGE if shape is None else shape
    directory.mkdir(parents=True, exist_ok=True)
    header: dict[str, dict[str, object]] = {}
    layers, end = {}, 0
    for name, dtype, dimensions in tensors(shape):
        nbytes = int(np.prod(dimensions, dtype=np.int64)) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(dimensions), "data_offsets": [end, end + nbytes]}
        end += nbytes
        if name.endswith("_proj.weight"):
            is_nvfp4 = ".mlp." in name
            layers[name.removesuffix(".weight")] = (
                {"quant_algo": "NVFP4", "group_size": 16} if is_nvfp4 else {"quant_algo": "FP8"}
            )
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        # The embedding table comes first. Its beginning tells it from the output table, which is all zeros.
        file.write(b"\x3c" * 4096)
        file.truncate(8 + len(text) + end)
    return end
