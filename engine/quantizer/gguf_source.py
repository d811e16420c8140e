"""Reads a GGUF file and writes it as a Hugging Face directory in BF16, which every other part can read.

Names, shapes and hyperparameters follow llama.cpp's conversion script and ggml's GGUF specification. Two
things are not plain renaming: llama.cpp stores q and k of the Llama layout with the halves of each head
interleaved, and keeps llama3's rotary scaling as a tensor of factors instead of its four numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from engine.errors import CheckpointError, UnsupportedModelError
from engine.quantizer.gguf_tokenizer import TokenizerFiles, rebuild_tokenizer
from engine.quantizer.writer import CheckpointWriter

__all__ = ["GGUFModel", "convert_gguf"]

Progress = Callable[[int, int], None]
"""called with what is done and the total"""

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    gguf_name: str
    shape: tuple[int, ...]
    data: np.ndarray
    kind: Any


class GGUFModel:
    """A GGUF file, mapped: its configuration, its tokenizer and its tensors by their Hugging Face names.

    Raises
    ------
    CheckpointError
        The file is missing, damaged, or lacks a field or tensor that its architecture needs.
    UnsupportedModelError
        The architecture, tokenizer or rotary scaling is not one that vtserve serves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, self._tensors = _read(path)
        self.architecture = self._text("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: architecture {self.architecture!r} is not served; "
                f"expected one of {', '.join(_ARCHITECTURES)}"
            )
        if self._number("expert_count", 0):
            raise UnsupportedModelError(f"{path}: mixture-of-experts models are not served")
        self._heads = self._positive("attention.head_count")
        self._kv_heads = self._positive("attention.head_count_kv", self._heads)
        hidden = self._positive("embedding_length")
        self._head_dim = self._positive("attention.key_length", hidden // self._heads)
        self._entries = dict(self._named_tensors())
        for needed in ("model.embed_tokens.weight", "model.norm.weight"):
            if needed not in self._entries:
                raise CheckpointError(f"{path}: tensor for {needed} is missing")

    @property
    def names(self) -> list[str]:
        """Tensor names, as in a Hugging Face checkpoint."""
        return list(self._entries)

    def tensor(self, name: str) -> np.ndarray:
        """Dequantised float32 values of one tensor in Hugging Face's layout."""
        entry = self._entries[name]
        try:
            with np.errstate(all="ignore"):  # what holds no numbers is refused where it is written
                values = np.asarray(dequantize(entry.data, entry.kind), np.float32).reshape(entry.shape)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: tensor {entry.gguf_name} is {entry.kind.name}, "
                "which the gguf library cannot read"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {entry.gguf_name} cannot be read: {error}") from None
        if self.architecture == "llama" and ".self_attn.q_proj." in name:
            return self._uninterleave(values, self._heads, entry)
        if self.architecture == "llama" and ".self_attn.k_proj." in name:
            return self._uninterleave(values, self._kv_heads, entry)
        return values

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        architecture, model_type = _ARCHITECTURES[self.architecture]
        embeddings = self._entries["model.embed_tokens.weight"].shape
        attention_bias = "model.layers.0.self_attn.q_proj.bias" in self._entries
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": embeddings[0],
            "hidden_size": self._positive("embedding_length"),
            "intermediate_size": self._positive("feed_forward_length"),
            "num_hidden_layers": self._positive("block_count"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "max_position_embeddings": self._positive("context_length"),
            "rms_norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._number("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "lm_head.weight" not in self._entries,
            "hidden_act": "silu",
            "attention_bias": attention_bias,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        window = self._number("attention.sliding_window", 0)
        if window:
            config["sliding_window"] = int(window)
            if self.architecture == "llama":
                config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            else:
                config |= {"use_sliding_window": True, "max_window_layers": 0}
        for key, field in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
            value = self._fields.get(f"tokenizer.ggml.{field}_token_id")
            if value is not None:
                config[key] = int(value)
        return config

    def generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json: all tokens that end a reply."""
        ends = [self._fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        unique = sorted({int(end) for end in ends if end is not None})
        config: dict[str, Any] = {"_from_model_config": True}
        for key, field in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
            value = self._fields.get(f"tokenizer.ggml.{field}_token_id")
            if value is not None:
                config[key] = int(value)
        if unique:
            config["eos_token_id"] = unique[0] if len(unique) == 1 else unique
        return config

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer, rebuilt from the file's metadata."""
        return rebuild_tokenizer(self._fields, self.path, int(self._positive("context_length")))

    def _uninterleave(self, values: np.ndarray, heads: int, entry: _TensorEntry) -> np.ndarray:
        """Undo llama.cpp's permutation: rows (pair, half) of each head become (half, pair), as rotate-half
        wants them.
        """
        half, rest = divmod(len(values), 2 * heads)
        if rest:
            raise CheckpointError(
                f"{self.path}: tensor {entry.gguf_name}: {len(values)} rows are not {heads} heads of equal "
                "and even size"
            )
        return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    def _named_tensors(self) -> Iterator[tuple[str, _TensorEntry]]:
        for entry in self._tensors:
            name = entry.gguf_name
            layer = _LAYER_NAME.fullmatch(name)
            if name in _TOP_LEVEL:
                yield _TOP_LEVEL[name], entry
            elif layer and layer[2] in _LAYER:
                yield f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}", entry
            elif name != _ROPE_FACTORS:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has no place in architecture {self.architecture!r}"
                )

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._fields.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": _shortest(self._number("rope.scaling.factor"))}
        if kind != "none":
            raise UnsupportedModelError(f"{self.path}: rotary scaling {kind!r} is not served")
        for entry in self._tensors:
            if entry.gguf_name == _ROPE_FACTORS:
                return self._llama3_scaling(np.asarray(entry.data, np.float32).ravel())
        return None

    def _llama3_scaling(self, factors: np.ndarray) -> dict[str, Any]:
        """The four numbers of ``rope_type: llama3`` behind a tensor of factors, which they must reproduce."""
        from engine.model.config import RopeConfig
        from engine.model.rope import inverse_frequencies

        theta = float(self._number("rope.freq_base", 10_000.0))
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max(initial=1.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled = inverse_frequencies(
            RopeConfig(theta=theta, **scaling),  # type: ignore[arg-type]
            self._head_dim,
        )
        plain = inverse_frequencies(RopeConfig(theta=theta), self._head_dim)
        if len(factors) != len(plain) or not np.allclose(plain / factors, scaled, rtol=1e-3):
            raise UnsupportedModelError(
                f"{self.path}: {_ROPE_FACTORS} holds rotary factors other than llama3's, which are not served"
            )
        return scaling

    def _text(self, key: str) -> str:
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path}: metadata field {key} is missing")
        return value

    def _number(self, key: str, default: object = _MISSING) -> float:
        value = self._fields.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # per layer, all the same
        if value is _MISSING:
            raise CheckpointError(f"{self.path}: metadata field {self.architecture}.{key} is missing")
        if not isinstance(value, int | float):
            raise UnsupportedModelError(
                f"{self.path}: {self.architecture}.{key} differs by layer, which is not served"
            )
        return value

    def _positive(self, key: str, default: object = _MISSING) -> int:
        value = self._number(key, default)
        if value != int(value) or value <= 0:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is {value}; expected a positive whole number"
            )
        return int(value)


def convert_gguf(path: Path, out: Path, progress: Progress | None = None) -> None:
    """Write the GGUF file at `path` as a Hugging Face checkpoint in BF16 into the directory `out`, one tensor
    at a time.

    Raises what `GGUFModel` does.
    """
    model = GGUFModel(path)
    config, generation, tokenizer = model.config(), model.generation_config(), model.tokenizer()
    with CheckpointWriter(out) as writer:
        for done, name in enumerate(model.names):
            if progress:
                progress(done, len(model.names))
            writer.add(name, model.tensor(name).astype(ml_dtypes.bfloat16))
        writer.finish()
    writer.write_json("config.json", config)
    writer.write_json("generation_config.json", generation)
    tokenizer.write(out)
    if progress:
        progress(len(model.names), len(model.names))


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF's 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _read(path: Path) -> tuple[dict[str, Any], list[_TensorEntry]]:
    """Metadata values by key, and the tensors with their data mapped."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path}: not a readable GGUF file, or only part of one: {reason}") from None
    tensors = [
        _TensorEntry(t.name, tuple(int(n) for n in reversed(t.shape)), t.data, t.tensor_type)
        for t in reader.tensors
    ]
    return fields, tensors
