"""Checkpoints of any size with random contents, as ModelOpt writes them: for figures that do not depend on
what a model says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LARGE = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
SMALL = LARGE | {
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EIGHT_B = LARGE | {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
}
"""the model of most published figures"""

Stored = tuple[str, str, tuple[int, ...]]
"""name, safetensors' element type, shape"""
SIZES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}


def tensors(shape: dict[str, int], *, nvfp4_attention: bool = False) -> Iterator[Stored]:
    """What a checkpoint of this shape holds, in order."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    query, key = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", "BF16", (shape["vocab_size"], hidden)
    yield "lm_head.weight", "BF16", (shape["vocab_size"], hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", "BF16", (hidden,)
        for module, rows, columns in (
            ("q_proj", query, hidden),
            ("k_proj", key, hidden),
            ("v_proj", key, hidden),
            ("o_proj", hidden, query),
        ):
            if nvfp4_attention:
                yield from nvfp4_linear(f"{name}.self_attn.{module}", rows, columns)
            else:
                yield f"{name}.self_attn.{module}.weight", "F8_E4M3", (rows, columns)
                yield f"{name}.self_attn.{module}.weight_scale", "F32", ()
        yield f"{name}.self_attn.k_proj.k_scale", "F32", ()
        yield f"{name}.self_attn.v_proj.v_scale", "F32", ()
        for module, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            yield from nvfp4_linear(f"{name}.mlp.{module}", rows, columns)


def nvfp4_linear(name: str, rows: int, columns: int) -> Iterator[Stored]:
    yield f"{name}.weight", "U8", (rows, columns // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{name}.weight_scale_2", "F32", ()


class Values:
    """Random bytes of each kind, drawn once and handed out from random places."""

    def __init__(self, seed: int, size: int) -> None:
        self._rng = np.random.default_rng(seed)
        codes = self._rng.integers(0, 256, size, np.uint8)
        normal = self._rng.standard_normal(size // 4, np.float32) * 0.02
        self._pools = {
            "codes": codes,
            # No exponent beyond 2^0, hence no NaN.
            "fp8": codes & np.uint8(0xBF),
            # From 0.25 to 2: group scales that make weights of like size.
            "scales": np.uint8(0x28) + codes % np.uint8(0x18),
            "table": (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
        }

    def pieces(self, kind: str, nbytes: int) -> Iterator[memoryview]:
        pool = self._pools[kind]
        while nbytes:
            begin = int(self._rng.integers(0, len(pool) // 4)) & ~63
            piece = pool[begin : begin + nbytes]
            yield memoryview(piece)
            nbytes -= len(piece)


def nbytes_of(dtype: str, dimensions: Sequence[int]) -> int:
    return int(np.prod(dimensions, dtype=np.int64)) * SIZES[dtype]


def describe(shape: dict[str, int], stored: Sequence[Stored]) -> tuple[dict[str, Any], bytes, int]:
    """A checkpoint's config.json, what its safetensors file begins with, and the bytes of its tensors."""
    header: dict[str, dict[str, Any]] = {}
    layers, end = {}, 0
    for name, dtype, dimensions in stored:
        begin, end = end, end + nbytes_of(dtype, dimensions)
        header[name] = {"dtype": dtype, "shape": dimensions, "data_offsets": [begin, end]}
        if name.endswith("_proj.weight"):
            is_nvfp4 = dtype == "U8"
            layers[name.removesuffix(".weight")] = (
                {"quant_algo": "NVFP4", "group_size": 16} if is_nvfp4 else {"quant_algo": "FP8"}
            )
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
    }
    text = json.dumps(header).encode()
    return config, struct.pack("<Q", len(text)) + text, end


def make_checkpoint(
    directory: Path, shape: dict[str, int], tokenizer: Path, *, nvfp4_attention: bool = False
) -> int:
    """Write the checkpoint; returns its bytes. Its attention is FP8 if not `nvfp4_attention`."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((tokenizer / file).read_bytes())
    stored = list(tensors(shape, nvfp4_attention=nvfp4_attention))
    config, header, end = describe(shape, stored)
    (directory / "config.json").write_text(json.dumps(config))
    values = Values(0, min(256 << 20, 1 << max(20, (end // 8).bit_length())))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        for name, dtype, dimensions in stored:
            if dtype == "F32":
                scale = {"k_scale": 0.02, "v_scale": 0.02, "weight_scale_2": 0.005}.get(
                    name.rsplit(".", 1)[1], 0.02
                )
                file.write(struct.pack("<f", scale))
            elif dtype == "BF16" and len(dimensions) == 1:
                file.write(np.full(dimensions, 0x3F80, np.uint16).tobytes())
            else:
                kind = {"U8": "codes", "BF16": "table"}.get(
                    dtype, "scales" if name.endswith("_scale") else "fp8"
                )
                for piece in values.pieces(kind, nbytes_of(dtype, dimensions)):
                    file.write(piece)
    return end
