"""How a request wants its tokens chosen."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request, with OpenAI's and vLLM's names and meanings."""

    max_tokens: int | None = 16
    """None: as many as fit in the model's length"""
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all"""
    min_p: float = 0.0
    """tokens less likely than min_p times the likeliest are dropped"""
    seed: int | None = None
    """the same seed gives the same tokens whatever else is in the batch"""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """top-K log probabilities of every output token (0: only the chosen token's)"""
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    """over prompt and output (Keskar et al. 2019)"""
    presence_penalty: float = 0.0
    """over output"""
    frequency_penalty: float = 0.0
    """over output"""
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
