"""Llama (Touvron et al. 2023), and what Mistral, Qwen2 and Qwen3 share with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backend.protocol import (
    AttentionSpec,
    Backend,
    DType,
    KVLayer,
    Linear,
    StepInputs,
    StepLimits,
    Tensor,
)
from engine.memory.scope import memory_scope
from engine.model.config import ModelConfig
from engine.model.loader import WeightLoader
from engine.model.rope import inverse_frequencies


@dataclass(slots=True, eq=False)
class Layer:
    """One decoder layer's weights. q, k, v and gate, up are stacked: one product each."""

    input_norm: Tensor
    qkv: Linear
    attention: AttentionSpec
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class Workspace:
    """Activations of one step, allocated once for the largest step and reused by every layer.

    All are [tokens, features] in the backend's activation dtype, but `logits`: float32 [rows, vocabulary].
    """

    def __init__(self, config: ModelConfig, backend: Backend, limits: StepLimits) -> None:
        tokens, dtype = limits.max_tokens, backend.activation_dtype
        query = config.num_heads * config.head_dim
        key = config.num_kv_heads * config.head_dim

        def empty(name: str, rows: int, features: int, dtype: DType = dtype) -> Tensor:
            with memory_scope(f"workspace/{name}"):
                return backend.empty((rows, features), dtype)

        self.residual = empty("residual", tokens, config.hidden_size)
        self.normed = empty("normed", tokens, config.hidden_size)
        self.hidden = empty("hidden", tokens, config.hidden_size)
        self.qkv = empty("qkv", tokens, query + 2 * key)
        self.attention = empty("attention", tokens, query)
        self.gate_up = empty("gate_up", tokens, 2 * config.intermediate_size)
        self.activated = empty("activated", tokens, config.intermediate_size)
        self.last_hidden = empty("last_hidden", limits.max_logits_rows, config.hidden_size)
        self.logits = empty("logits", limits.max_logits_rows, config.vocab_size, DType.FLOAT32)


class Llama:
    """Decoder-only transformer: RMS norm, rotary attention with grouped queries, SwiGLU."""

    qk_norm = False
    """RMS norm per head on q and k before RoPE (Qwen3)"""

    def __init__(self, config: ModelConfig, weights: WeightLoader, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        hidden, vocab = config.hidden_size, config.vocab_size

        # config.json's tie_word_embeddings can be wrong: the tensors present decide, but a head that it
        # promises and that is not there was lost. Some checkpoints of tied models hold the table twice.
        if config.tie_word_embeddings is False and not weights.has_linear("lm_head"):
            raise weights.missing("lm_head", "tie_word_embeddings is false")
        if weights.has_linear("lm_head") and not weights.is_repeated("lm_head", "model.embed_tokens"):
            self.lm_head = weights.linear("lm_head", ["lm_head"], [vocab], hidden)
            self.embed_tokens = weights.table("model.embed_tokens", (vocab, hidden))
        else:
            self.lm_head = weights.tied_table("model.embed_tokens", (vocab, hidden))
            self.embed_tokens = backend.as_table(self.lm_head)

        inv_freq = weights.constant("rope", inverse_frequencies(config.rope, config.head_dim))
        self.layers = [self._load_layer(index, weights, inv_freq) for index in range(config.num_layers)]
        self.norm = weights.vector("model.norm.weight", hidden)
        weights.finish()
        self.workspace: Workspace | None = None

    def _load_layer(self, index: int, weights: WeightLoader, inv_freq: Tensor) -> Layer:
        c, p = self.config, f"model.layers.{index}"
        attn, mlp = f"{p}.self_attn", f"{p}.mlp"
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Layer(
            input_norm=weights.vector(f"{p}.input_layernorm.weight", c.hidden_size),
            qkv=weights.linear(
                f"{attn}.qkv_proj",
                [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"],
                [query, key, key],
                c.hidden_size,
            ),
            attention=AttentionSpec(
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                scale=c.head_dim**-0.5,
                inv_freq=inv_freq,
                rope_magnitude=c.rope.magnitude,
                sliding_window=c.sliding_windows[index],
                q_norm=weights.vector(f"{attn}.q_norm.weight", c.head_dim) if self.qk_norm else None,
                k_norm=weights.vector(f"{attn}.k_norm.weight", c.head_dim) if self.qk_norm else None,
                norm_eps=c.rms_norm_eps,
            ),
            o=weights.linear(f"{attn}.o_proj", [f"{attn}.o_proj"], [c.hidden_size], query),
            post_attention_norm=weights.vector(f"{p}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=weights.linear(
                f"{mlp}.gate_up_proj",
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                [c.intermediate_size] * 2,
                c.hidden_size,
            ),
            down=weights.linear(
                f"{mlp}.down_proj", [f"{mlp}.down_proj"], [c.hidden_size], c.intermediate_size
            ),
        )

    def reserve(self, limits: StepLimits) -> None:
        """Allocate the activations of the largest step."""
        self.workspace = Workspace(self.config, self.backend, limits)

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> Tensor:
        """Run one step. Stores K and V of every token in `kv`; returns logits, float32 [R, V], valid until
        the next step.
        """
        ops, ws, eps = self.backend, self.workspace, self.config.rms_norm_eps
        assert ws is not None, "reserve() comes before forward()"
        n, r = inputs.num_tokens, inputs.num_logits_rows
        residual, normed, hidden = ws.residual.rows(n), ws.normed.rows(n), ws.hidden.rows(n)
        qkv, attended = ws.qkv.rows(n), ws.attention.rows(n)
        gate_up, activated = ws.gate_up.rows(n), ws.activated.rows(n)

        ops.embedding(inputs.token_ids, self.embed_tokens, out=residual)
        for index, (layer, cache) in enumerate(zip(self.layers, kv, strict=True)):
            if index == 0:
                ops.rms_norm(residual, layer.input_norm, eps, out=normed)
            else:
                ops.add_rms_norm(residual, hidden, layer.input_norm, eps, out=normed)
            ops.linear(normed, layer.qkv, out=qkv)
            ops.rope_and_store_kv(qkv, inputs, cache, layer.attention)
            ops.attention(qkv, inputs, cache, layer.attention, out=attended)
            ops.linear(attended, layer.o, out=hidden)
            ops.add_rms_norm(residual, hidden, layer.post_attention_norm, eps, out=normed)
            ops.linear(normed, layer.gate_up, out=gate_up)
            ops.silu_and_mul(gate_up, out=activated)
            ops.linear(activated, layer.down, out=hidden)
        ops.add_rms_norm(residual, hidden, self.norm, eps, out=normed)

        last, logits = ws.last_hidden.rows(r), ws.logits.rows(r)
        ops.gather_rows(normed, inputs.logits_rows, out=last)
        ops.linear(last, self.lm_head, out=logits)
        return logits
