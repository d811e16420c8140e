"""Writes small GGUF files with the gguf library's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize as quantize_ggml
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of q and k, as its conversion script has it."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: special tokens, 256 bytes, a few words."""
    merges = ["Ġ t", "h e", "Ġt he", "Ġ c", "a t", "Ġc at", "1 2"]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)], merges


def random_weights(
    rng: np.random.Generator, *, bias: bool = False, tied: bool = True
) -> dict[str, np.ndarray]:
    """Weights of a small model by their Hugging Face names."""
    vocab = len(vocabulary()[0])
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        shapes |= {
            f"{p}.input_layernorm.weight": (HIDDEN,),
            f"{p}.post_attention_layernorm.weight": (HIDDEN,),
            f"{p}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{p}.self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{p}.self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{p}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{p}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{p}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{p}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        if bias:
            shapes |= {
                f"{p}.self_attn.q_proj.bias": (HIDDEN,),
                f"{p}.self_attn.k_proj.bias": (KV_HEADS * head,),
                f"{p}.self_attn.v_proj.bias": (KV_HEADS * head,),
            }
    if not tied:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    return {
        name: (
            rng.standard_normal(shape) * (0.02 if len(shape) == 2 else 0.1) + (name.endswith("norm.weight"))
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    weights: Mapping[str, np.ndarray],
    *,
    arch: str = "llama",
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    pre: str = "smollm",
    extra: Mapping[str, np.ndarray] | None = None,
    fields: Mapping[str, Any] | None = None,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """Write `weights` as llama.cpp's conversion script would; `kinds` by Hugging Face name, else F32."""
    writer = gguf.GGUFWriter(path, arch)

    def put(key: str, write: Any, *values: Any) -> None:
        if key not in leave_out:
            write(*values)

    put("block_count", writer.add_block_count, LAYERS)
    put("context_length", writer.add_context_length, 512)
    put("embedding_length", writer.add_embedding_length, HIDDEN)
    put("feed_forward_length", writer.add_feed_forward_length, INTERMEDIATE)
    put("head_count", writer.add_head_count, HEADS)
    put("head_count_kv", writer.add_head_count_kv, KV_HEADS)
    put("rms_eps", writer.add_layer_norm_rms_eps, 1e-5)
    put("freq_base", writer.add_rope_freq_base, 10000.0)
    tokens, merges = vocabulary()
    put("model", writer.add_tokenizer_model, "gpt2")
    put("pre", writer.add_tokenizer_pre, pre)
    put("tokens", writer.add_token_list, tokens)
    put("merges", writer.add_token_merges, merges)
    put("types", writer.add_token_types, [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    put("bos", writer.add_bos_token_id, 1)
    put("eos", writer.add_eos_token_id, 2)
    put("template", writer.add_chat_template, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for key, value in (fields or {}).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for name, values in weights.items():
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            target = f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"
        else:
            target = f"{GGUF_NAMES[stem]}.{suffix}"
        if arch == "llama" and ".q_proj" in name:
            values = interleave(values, HEADS)
        if arch == "llama" and ".k_proj" in name:
            values = interleave(values, KV_HEADS)
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        data = quantize_ggml(values, kind)
        writer.add_tensor(target, data, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
