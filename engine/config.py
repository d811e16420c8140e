"""The engine's flags, with vLLM's names, and what they come to once device and model are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import msgspec

from engine.backend.protocol import StepLimits
from engine.errors import ConfigurationError

__all__ = [
    "CudaAllocator",
    "DeviceName",
    "EngineConfig",
    "EngineLimits",
    "KVCacheDType",
    "SchedulingPolicy",
    "flag_name",
]

DeviceName = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "bfloat16", "float32"]
SchedulingPolicy = Literal["fcfs", "priority"]
CudaAllocator = Literal["malloc", "pool"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is asked to be. One field a flag; `flag_name` gives the flag's spelling.

    Raises
    ------
    ConfigurationError
        A field has a value that cannot be used: one line that names the flag.
    """

    model: str
    """directory of a checkpoint, or a Hugging Face id"""
    device: DeviceName = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    """auto follows the checkpoint; float32 is for reference runs"""
    kv_cache_memory: int | None = None
    """bytes of the KV cache; None: what `gpu_memory_utilization` leaves"""
    gpu_memory_utilization: float = 0.9
    """part of the device that weights, workspace and KV cache may fill, if `kv_cache_memory` is not given"""
    device_memory: int | None = None
    """capacity of the CPU device in bytes; None: what the host has"""
    cuda_allocator: CudaAllocator = "malloc"
    """where a GPU's memory comes from: cudaMalloc, or a stream-ordered pool of the engine's own"""
    enforce_eager: bool = True
    """run a GPU's decode steps kernel by kernel; False: as CUDA graphs, captured as their sizes occur"""
    max_num_seqs: int | None = None
    """sequences that run at once; None: 32 on the CPU, 64 on CUDA"""
    max_model_len: int | None = None
    """longest prompt and output together; None: the model's, or what an explicit `kv_cache_memory` holds"""
    max_num_batched_tokens: int | None = None
    """tokens of one step, prefill and decode together; None: 512 on the CPU, 2048 on CUDA"""
    block_size: int = 16
    """tokens of one KV cache block"""
    enable_prefix_caching: bool = True
    threads: int | None = None
    """CPU threads; None: all cores"""
    seed: int | None = None
    """of requests without a seed of their own; None: fresh with each engine"""
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_logits_rows: int | None = None
    """rows of logits in one step; None: `max_num_seqs`. `prompt_logprobs` want a row for each token."""
    max_logprobs: int = 20
    """most log probabilities that a request may ask for at each position"""
    failure_dir: str | None = None
    """where failure records go; None: ``$XDG_STATE_HOME/vtserve/failures``"""
    record_prompts: bool = False
    """put the requests' prompts into failure records"""

    def __post_init__(self) -> None:
        if not self.model or not isinstance(self.model, str):
            raise ConfigurationError("--model: expected a directory or a Hugging Face id")
        for name in ("model", "failure_dir"):
            _check_text(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigurationError(f"{flag_name(name)} {value!r}: expected one of {', '.join(choices)}")
        for name, (low, high) in _RANGES.items():
            _check_integer(name, getattr(self, name), low, high)
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:  # NaN fails too
            raise ConfigurationError(
                f"--gpu-memory-utilization {share!r}: expected a number over 0 and up to 1"
            )
        tokens, seqs, rows = self.max_num_batched_tokens, self.max_num_seqs, self.max_logits_rows
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ConfigurationError(
                f"--max-num-batched-tokens {tokens}: expected at least --max-num-seqs {seqs}, "
                "a token for each sequence in a step"
            )
        if rows is not None and seqs is not None and rows < seqs:
            raise ConfigurationError(f"--max-logits-rows {rows}: expected at least --max-num-seqs {seqs}")

    @classmethod
    def from_flags(cls, **flags: Any) -> Self:
        """The configuration that `flags` give; None stands for a flag that was not given.

        Raises
        ------
        ConfigurationError
            A value cannot be used, or a name is no flag of the engine.
        """
        unknown = sorted(set(flags) - set(cls.__struct_fields__))
        if unknown:
            raise ConfigurationError(f"{flag_name(unknown[0])}: the engine has no such flag")
        if flags.get("model") is None:
            raise ConfigurationError("--model: expected a directory or a Hugging Face id")
        return cls(**{name: value for name, value in flags.items() if value is not None})


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was built for: the configuration with device and model known. Nothing is None."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    max_logits_rows: int
    vocab_size: int
    max_logprobs: int = 20

    @classmethod
    def resolve(
        cls, config: EngineConfig, *, device: str, vocab_size: int, max_position_embeddings: int
    ) -> Self:
        """Fill in what `config` leaves open for a model on `device` (``cpu`` or ``cuda``).

        Raises
        ------
        ConfigurationError
            `max_model_len` is more positions than the model has.
        """
        length = config.max_model_len or max_position_embeddings
        if length > max_position_embeddings:
            raise ConfigurationError(
                f"--max-model-len {length}: the model has {max_position_embeddings} positions; "
                f"expected at most --max-model-len {max_position_embeddings}"
            )
        seqs = config.max_num_seqs or _DEFAULT_SEQS[device]
        tokens = config.max_num_batched_tokens or max(_DEFAULT_TOKENS[device], seqs)
        seqs = min(seqs, tokens)
        return cls(
            max_num_seqs=seqs,
            max_model_len=length,
            max_num_batched_tokens=tokens,
            block_size=config.block_size,
            max_logits_rows=max(seqs, min(config.max_logits_rows or seqs, tokens)),
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
        )

    @property
    def max_blocks_per_seq(self) -> int:
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def step(self) -> StepLimits:
        """The largest step."""
        return StepLimits(
            max_tokens=self.max_num_batched_tokens,
            max_seqs=self.max_num_seqs,
            max_blocks_per_seq=self.max_blocks_per_seq,
            max_logits_rows=self.max_logits_rows,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
        )


def flag_name(field: str) -> str:
    """The command line's spelling of a field: ``--max-num-seqs``."""
    return "--" + field.replace("_", "-")


_DEFAULT_SEQS: Mapping[str, int] = {"cpu": 32, "cuda": 64}
_DEFAULT_TOKENS: Mapping[str, int] = {"cpu": 512, "cuda": 2048}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": get_args(DeviceName),
    "kv_cache_dtype": get_args(KVCacheDType),
    "cuda_allocator": get_args(CudaAllocator),
    "scheduling_policy": get_args(SchedulingPolicy),
}
_RANGES: Mapping[str, tuple[int, int]] = {
    "kv_cache_memory": (1, 2**63 - 1),
    "device_memory": (1, 2**63 - 1),
    "max_num_seqs": (1, 65_536),
    "max_model_len": (1, 2**31 - 1),
    "max_num_batched_tokens": (1, 2**20),
    "block_size": (1, 256),
    "threads": (1, 4096),
    "seed": (0, 2**64 - 1),
    "max_logits_rows": (1, 2**20),
    "max_logprobs": (0, 2**20),
}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(f"{flag_name(name)} {value!r}: expected a whole number from {low} to {high}")


def _check_text(name: str, value: str | None) -> None:
    """Refuse a path that neither JSON nor the libraries that read a model can write."""
    if value is not None and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigurationError(f"{flag_name(name)} {value!r}: expected a path in UTF-8")
