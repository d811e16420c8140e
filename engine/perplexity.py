"""Perplexity of a model on a text: how unexpected each token is, given those before it in its window."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigurationError, EngineError, RequestError
from engine.llm import LLM
from engine.model.checkpoint import Checkpoint, resolve_model
from engine.model.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams

__all__ = ["Perplexity", "measure_perplexity", "perplexity_config", "windows"]

_CHUNK = 512  # positions whose logits are held at once: 512 of 152,000 float32 are 300 MB
_LARGEST_LOG = math.log(sys.float_info.max)
_TOO_SHORT = "the text has fewer than two tokens: there is nothing to predict"


class Perplexity(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. `perplexity` is exp of the mean negative log-likelihood, in nats, of the predicted
    tokens."""

    perplexity: float
    nll_mean: float
    tokens: int
    """of the text"""
    predicted_tokens: int
    """all but the first of each window"""
    window: int
    seconds: float
    tokens_per_second: float


def perplexity_config(model: str, text: str, *, window: int | None = None, **flags: Any) -> EngineConfig:
    """Flags of an engine for `measure_perplexity`: one sequence at a time, logits of 512 positions at once.

    Parameters
    ----------
    window
        As in `measure_perplexity`; None: the whole text, or all positions of the model if it is longer.

    Raises
    ------
    ConfigurationError, CheckpointError
        A flag, the text or the checkpoint cannot be used.
    """
    directory = resolve_model(model)
    positions = Checkpoint.open(directory).config.max_position_embeddings
    tokens = len(Tokenizer.open(directory).encode(text))
    if window is not None and window >= positions:
        raise ConfigurationError(f"--window {window}: the model has {positions} positions; expected fewer")
    if tokens < 2:
        raise ConfigurationError(f"--file: {_TOO_SHORT}")
    longest = min(window or tokens, tokens)
    return EngineConfig.from_flags(
        model=str(directory),
        max_num_seqs=1,
        # A token more than the window: the engine generates one.
        max_model_len=min(longest + 1, positions),
        max_num_batched_tokens=_CHUNK,
        max_logits_rows=_CHUNK,
        enable_prefix_caching=False,
        **flags,
    )


def windows(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive windows of `size` tokens. A last one of a single token predicts nothing and is dropped."""
    cut = [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [part for part in cut if len(part) > 1]


def measure_perplexity(llm: LLM, text: str, window: int | None = None) -> Perplexity:
    """Perplexity of `text` in windows that know nothing of each other.

    Parameters
    ----------
    window
        Tokens of a window; None: the whole text, or as much as the engine takes at once.

    Raises
    ------
    RequestError
        The text has fewer than two tokens, or a window does not fit the engine's `max_model_len`.
    EngineError
        The engine failed on a window.
    """
    token_ids = llm.tokenizer.encode(text)
    if len(token_ids) < 2:
        raise RequestError(_TOO_SHORT)
    size = window or min(len(token_ids), llm.limits.max_model_len - 1)
    parts = windows(token_ids, size)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(parts, params)
    seconds = time.perf_counter() - started
    nll, predicted = 0.0, 0
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error)
        for position in (output.prompt_logprobs or [])[1:]:
            assert position is not None, "every token but a window's first is predicted"
            nll -= position.chosen.logprob
            predicted += 1
    if predicted != sum(len(part) - 1 for part in parts):
        raise EngineError(
            f"expected log probabilities of {sum(len(p) - 1 for p in parts)} tokens, got {predicted}"
        )
    mean = nll / predicted
    return Perplexity(
        perplexity=math.exp(mean) if mean < _LARGEST_LOG else math.inf,
        nll_mean=mean,
        tokens=len(token_ids),
        predicted_tokens=predicted,
        window=size,
        seconds=seconds,
        tokens_per_second=sum(map(len, parts)) / seconds,
    )
