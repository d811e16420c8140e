"""Choosing tokens from logits on the host.

Each row is decided by its own logits, parameters, key and position, and by nothing else in the batch. The
order of operations and the meaning of every parameter are vLLM's: log probabilities are those of the raw
logits; then logit bias and `min_tokens`, penalties, temperature, min-p, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.sampling_params import SamplingParams

__all__ = ["INVALID_TOKEN", "PendingTokens", "SampledTokens", "SamplingRow", "TokenLogprobs", "sample"]

INVALID_TOKEN = -1
"""Stands where no token could be chosen: a row with NaN, or without a single finite logit."""

_FLOAT32 = np.finfo(np.float32)


@dataclass(slots=True, eq=False)
class SamplingRow:
    """What one row of logits is wanted for, and what came before it."""

    request_id: str
    params: SamplingParams
    key: int
    """64 bits that key the request's random numbers: its seed, or the engine's choice"""
    position: int
    """of the token to choose in its sequence: the random numbers' counter"""
    prompt_token_ids: np.ndarray
    """int32 [P]"""
    output_token_ids: np.ndarray
    """int32 [O]: what was generated so far"""
    forbidden_token_ids: tuple[int, ...] = ()
    """may not be chosen: what ends the sequence, while it is shorter than `min_tokens`"""
    target_token_id: int | None = None
    """Known already: nothing is chosen, only its log probability is wanted (a row inside a prompt)."""

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside the chosen one; None: report nothing."""
        return self.params.logprobs if self.target_token_id is None else self.params.prompt_logprobs

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        """The likeliest token may not be the raw logits' largest: bias, penalties or forbidden tokens."""
        p = self.params
        return bool(
            self.forbidden_token_ids
            or p.logit_bias
            or p.repetition_penalty != 1.0
            or p.presence_penalty
            or p.frequency_penalty
        )


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log probabilities at one position: log-softmax of the raw logits, natural logarithm."""

    token_id: int
    """the token that was chosen, or that the prompt has there"""
    logprob: float
    rank: int
    """1 for the likeliest"""
    top_token_ids: np.ndarray
    """int32 [K], likeliest first"""
    top_logprobs: np.ndarray
    """float32 [K]"""


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The outcome for R rows."""

    token_ids: np.ndarray
    """int32 [R]: the chosen (or target) token; `INVALID_TOKEN` where the logits are unusable"""
    logprobs: list[TokenLogprobs | None]
    """[R]; None where a row asked for none"""

    def wait(self) -> SampledTokens:
        """Themselves: they are chosen. See `PendingTokens`."""
        return self


class PendingTokens(Protocol):
    """Tokens that a device is choosing."""

    def wait(self) -> SampledTokens:
        """The tokens, once they are chosen. To be called once. Raises the device's error, if it has one."""


def sample(logits: np.ndarray, rows: Sequence[SamplingRow]) -> SampledTokens:
    """Choose a token for each row of `logits`, float32 [R, V], which is left as it is.

    A row that holds NaN, or whose largest logit is infinite, yields `INVALID_TOKEN`. Of equal logits the
    greedy choice is the one with the smallest id.
    """
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} rows to sample")
    # argmax returns the first NaN if there is one, so the largest logit tells of every unusable row.
    likeliest = logits.argmax(axis=1) if rows else np.empty(0, np.int64)
    usable = np.isfinite(logits[np.arange(len(rows)), likeliest])
    token_ids = np.where(usable, likeliest, INVALID_TOKEN).astype(np.int32)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for index, row in enumerate(rows):
        if not usable[index]:
            continue
        raw = logits[index]
        if row.target_token_id is not None:
            token_ids[index] = row.target_token_id
        elif row.adjusts_logits or not row.greedy:
            token_ids[index] = _choose(raw, row)
        if row.num_logprobs is not None and token_ids[index] != INVALID_TOKEN:
            logprobs[index] = _logprobs(raw, int(token_ids[index]), row.num_logprobs)
    return SampledTokens(token_ids, logprobs)


def _choose(raw: np.ndarray, row: SamplingRow) -> int:
    logits = _adjusted(raw, row) if row.adjusts_logits else raw
    likeliest = int(logits.argmax())
    if not np.isfinite(logits[likeliest]):
        return INVALID_TOKEN
    if row.greedy:
        return likeliest
    candidates, probabilities = _candidates(logits, row.params)
    # The candidates are in the order of their ids, not of their probabilities, where the last bit of a logit
    # could exchange two and with them the choice.
    cumulative = probabilities.cumsum()
    threshold = _uniform(row.key, row.position) * cumulative[-1]
    chosen = int(np.searchsorted(cumulative, threshold, side="right"))
    return int(candidates[min(chosen, len(candidates) - 1)])


def _adjusted(raw: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Copy of `raw` with bias, forbidden tokens and penalties applied."""
    logits, params = raw.copy(), row.params
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        logits[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
    if row.forbidden_token_ids:
        logits[list(row.forbidden_token_ids)] = -np.inf
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([row.prompt_token_ids, row.output_token_ids]))
        values = logits[seen]
        factor = np.clip(params.repetition_penalty, _FLOAT32.smallest_normal, _FLOAT32.max).astype(np.float32)
        with np.errstate(over="ignore"):
            penalised = np.where(values > 0, values / factor, values * factor)
        # A factor may be as large or small as floats get; what was finite stays so, and can be chosen.
        finite = np.clip(penalised, _FLOAT32.min, _FLOAT32.max)
        logits[seen] = np.where(np.isfinite(values), finite, values)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(row.output_token_ids, return_counts=True)
        logits[seen] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    return logits


def _candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that min-p, top-k and top-p leave: ids (ascending) and unnormalised probabilities (float64).

    Each is a threshold, so tokens of equal probability stay or go together.
    """
    with np.errstate(over="ignore"):  # a tiny temperature: all but the likeliest go to exp(-inf)
        scaled = (logits - logits.max()).astype(np.float64) / params.temperature
    probabilities = np.exp(scaled)  # the likeliest is 1
    threshold = params.min_p
    if 0 < params.top_k < len(logits):
        kth = np.partition(probabilities, -params.top_k)[-params.top_k]
        threshold = max(threshold, float(kth))
    candidates = np.flatnonzero(probabilities >= threshold if threshold > 0 else probabilities > 0)
    probabilities = probabilities[candidates]
    if params.top_p < 1.0:
        kept = probabilities >= _nucleus_threshold(probabilities, params.top_p)
        candidates, probabilities = candidates[kept], probabilities[kept]
    return candidates, probabilities


def _nucleus_threshold(probabilities: np.ndarray, top_p: float) -> float:
    """Smallest probability in the smallest set that together reaches `top_p` (Holtzman et al. 2020)."""
    total = float(probabilities.sum())
    # Tokens below an equal share of what may be left out are left out all together: sort only the others.
    share = (1.0 - top_p) * total / len(probabilities)
    descending = np.sort(probabilities[probabilities >= share])[::-1]
    reached = int(np.searchsorted(descending.cumsum(), top_p * total, side="left"))
    return float(descending[min(reached, len(descending) - 1)])


def _uniform(key: int, position: int) -> float:
    """Random number in [0, 1) that belongs to `position` of the stream `key` (Philox, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def _logprobs(logits: np.ndarray, token_id: int, count: int) -> TokenLogprobs:
    largest = logits.max()
    normaliser = np.log(np.exp(logits - largest).sum(dtype=np.float64)) + np.float64(largest)
    top = np.empty(0, np.int64)
    if count:
        count = min(count, len(logits))
        top = np.argpartition(logits, -count)[-count:]
        top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits[token_id] - normaliser),
        rank=1 + int(np.count_nonzero(logits > logits[token_id])),
        top_token_ids=top.astype(np.int32),
        top_logprobs=(logits[top] - normaliser).astype(np.float32),
    )
