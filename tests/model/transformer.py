"""The served architectures in plain NumPy and float64, straight from a checkpoint's files.

It shares no code with the engine: it reads the container, the quantisation and the configuration by itself,
so that it can say what the engine should have computed where nobody else's numbers do: with keys and values
rounded to E4M3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Rounding = Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""What a cache does to one layer's keys and values: the layer's number, [n, kv_heads, D] each"""
Activation = Callable[[np.ndarray], np.ndarray]
"""What a backend makes of activations that it keeps in few bits"""
DTYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8, "F32": np.float32}


@dataclass(frozen=True)
class KVScales:
    """One layer's, per tensor."""

    key: float
    value: float


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """`x` rounded to bfloat16 by way of float32, as float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def to_e4m3(x: np.ndarray, scale: float) -> np.ndarray:
    """Codes of ``e4m3(saturate(x / scale))``, rounded once, in float32's precision."""
    scaled = x.astype(np.float32) / np.float32(scale)
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_rounding(scales: Sequence[KVScales]) -> Rounding:
    """Keys and values as a cache of E4M3 with `scales`, one a layer, gives them back."""

    def there_and_back(x: np.ndarray, scale: float) -> np.ndarray:
        return to_e4m3(x, scale).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float32(scale)

    def rounded(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return there_and_back(key, scales[layer].key), there_and_back(value, scales[layer].value)

    return rounded


@dataclass
class Run:
    """What one sequence went through."""

    logits: np.ndarray
    """[n, vocabulary]"""
    keys: list[np.ndarray]
    """by layer: [n, kv_heads, D] as they go to the cache, rotated, not rounded"""
    values: list[np.ndarray]


class Transformer:
    """A checkpoint of one safetensors file."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        data = (directory / "model.safetensors").read_bytes()
        header = int.from_bytes(data[:8], "little")
        self._body = memoryview(data)[8 + header :]
        self._tensors: dict[str, Any] = json.loads(data[8 : 8 + header])
        self._weights: dict[str, np.ndarray] = {}
        self.num_layers: int = self.config["num_hidden_layers"]
        self.heads: int = self.config["num_attention_heads"]
        self.kv_heads: int = self.config["num_key_value_heads"]
        self.head_dim: int = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    # -- weights -------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> np.ndarray:
        entry = self._tensors[name]
        begin, end = entry["data_offsets"]
        return np.frombuffer(self._body[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def number(self, name: str) -> float:
        return float(self.tensor(name).reshape(()))

    def weight(self, module: str) -> np.ndarray:
        """float64 [N, K], whatever it is stored in."""
        if module not in self._weights:
            self._weights[module] = self._read_weight(module)
        return self._weights[module]

    def _read_weight(self, module: str) -> np.ndarray:
        if self.has(f"{module}.weight_packed"):
            factor = 1.0 / self.number(f"{module}.weight_global_scale")
            return self._nvfp4(self.tensor(f"{module}.weight_packed"), module) * factor
        weight = self.tensor(f"{module}.weight")
        if weight.dtype == np.uint8:
            return self._nvfp4(weight, module) * self.number(f"{module}.weight_scale_2")
        if weight.dtype == ml_dtypes.float8_e4m3fn:
            return weight.astype(np.float64) * self.number(f"{module}.weight_scale")
        return weight.astype(np.float64)

    def _nvfp4(self, packed: np.ndarray, module: str) -> np.ndarray:
        values = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]
        return values * self.tensor(f"{module}.weight_scale").astype(np.float64).repeat(16, axis=1)

    def kv_scales(self, layer: int) -> KVScales | None:
        """What the checkpoint was calibrated for; None if it was not."""
        attention = f"model.layers.{layer}.self_attn"
        for key, value in (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")):
            if self.has(f"{attention}.{key}"):
                return KVScales(self.number(f"{attention}.{key}"), self.number(f"{attention}.{value}"))
        return None

    # -- the forward pass ----------------------------------------------------------------------------------

    def run(
        self,
        token_ids: Sequence[int],
        rounding: Rounding | None = None,
        activation: Activation = np.asarray,
    ) -> Run:
        """All positions of one sequence. Attention sees what `rounding` makes of keys and values.

        `activation` is applied wherever a backend stores activations between operations: after norms, after
        products (before the rotation of keys, which go to the cache as they are, and after that of queries),
        attention, SwiGLU, and each addition to the residual.
        """
        embeddings = self.tensor("model.embed_tokens.weight").astype(np.float64)
        x = embeddings[list(token_ids)]
        run = Run(np.empty(0), [], [])
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            normed = activation(self._norm(x, f"{name}.input_layernorm"))
            query, key, value = self._project(normed, f"{name}.self_attn", activation)
            run.keys.append(key)
            run.values.append(value)
            if rounding is not None:
                key, value = rounding(layer, key, value)
            attended = activation(self._attention(query, key, value))
            x = activation(x + activation(attended @ self.weight(f"{name}.self_attn.o_proj").T))
            normed = activation(self._norm(x, f"{name}.post_attention_layernorm"))
            gate = activation(normed @ self.weight(f"{name}.mlp.gate_proj").T)
            up = activation(normed @ self.weight(f"{name}.mlp.up_proj").T)
            activated = activation(gate / (1 + np.exp(-gate)) * up)
            x = activation(x + activation(activated @ self.weight(f"{name}.mlp.down_proj").T))
        head = embeddings if self.config["tie_word_embeddings"] else self.weight("lm_head")
        run.logits = activation(self._norm(x, "model.norm")) @ head.T
        return run

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return (
            x
            / np.sqrt(mean_square + self.config["rms_norm_eps"])
            * self.tensor(f"{name}.weight").astype(np.float64)
        )

    def _project(
        self, x: np.ndarray, name: str, activation: Activation
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parts = []
        for projection in ("q_proj", "k_proj", "v_proj"):
            y = x @ self.weight(f"{name}.{projection}").T
            if self.has(f"{name}.{projection}.bias"):
                y = y + self.tensor(f"{name}.{projection}.bias").astype(np.float64)
            parts.append(activation(y).reshape(len(x), -1, self.head_dim))
        query, key, value = parts
        if self.has(f"{name}.q_norm.weight"):
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        return activation(self._rotate(query)), self._rotate(key), value

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        # The published models multiply position and frequency in float32.
        positions = np.arange(len(x), dtype=np.float32)
        angles = (positions[:, None] * self._frequencies().astype(np.float32)).astype(np.float64)[:, None]
        low, high = np.split(x, 2, axis=-1)
        turned = low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)
        return np.concatenate(turned, axis=-1)

    def _frequencies(self) -> np.ndarray:
        rope = self.config["rope_parameters"]
        frequencies = rope["rope_theta"] ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        if rope["rope_type"] == "default":
            return frequencies
        assert rope["rope_type"] == "llama3"
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / rope["factor"])

    def _attention(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        group = self.heads // self.kv_heads
        key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
        query, key, value = (x.transpose(1, 0, 2) for x in (query, key, value))
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(self.head_dim)
        scores = np.where(np.tri(scores.shape[1], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ value).transpose(1, 0, 2).reshape(scores.shape[1], -1)
