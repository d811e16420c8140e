"""How a request wants its tokens chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from engine.errors import RequestError

__all__ = ["MAX_N", "SamplingParams"]

MAX_N = 16_384
"""Most sequences of one request: each takes memory before its first step. vLLM's VLLM_MAX_N_SEQUENCES."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request, with OpenAI's and vLLM's names and meanings.

    `stop` may be given as one string, and it and `stop_token_ids` as any iterable.

    Raises
    ------
    RequestError
        A parameter has a value that cannot be used: one line that names the field.
    """

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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop: {stop!r}: expected strings that are not empty", field="stop")
        force_setattr(self, "stop", stop)
        stop_ids = _sequence("stop_token_ids", self.stop_token_ids)
        for token in stop_ids:
            _check_integer("stop_token_ids", token, 0)
        force_setattr(self, "stop_token_ids", stop_ids)

        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens}: expected at most max_tokens {self.max_tokens}",
                field="min_tokens",
            )
        _check_integer("n", self.n, 1, MAX_N)
        _check_integer("top_k", self.top_k, -1)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_integer(name, count, 0)

        _check_number("temperature", self.temperature, 0.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, low_open=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in (self.logit_bias or {}).items():
            _check_integer("logit_bias", token, 0)
            _check_number("logit_bias", bias, -100.0, 100.0)


def _sequence(field: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise RequestError(f"{field}: {value!r}: expected a list", field=field)
    return tuple(value)


def _check_integer(field: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field}: {value!r}: expected a whole number", field=field)
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{field}: {value}: expected {expected}", field=field)


def _check_number(
    field: str, value: object, low: float, high: float = math.inf, *, low_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{field}: {value!r}: expected a number", field=field)
    if value < low or value > high or (low_open and value == low):
        bound = f"over {low:g}" if low_open else f"at least {low:g}"
        expected = bound if high == math.inf else f"{bound} and at most {high:g}"
        raise RequestError(f"{field}: {value}: expected {expected}", field=field)
