"""What is asked of a server, and when: drawn before the load begins, from one seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

__all__ = ["TEXT", "Prompt", "arrival_times", "token_prompts", "word_prompts"]

Prompt = str | list[int]
"""text, or token ids"""

TEXT = (
    "the of and to in is was for on that by this with you it not or be are from at as your all have new more"
    " an water house light small great world night under river stone paper green white black table music"
    " story number people letter mother father answer school garden winter summer morning"
)
"""English words; nearly every tokenizer has each of them as one token"""
_WORDS = TEXT.split()


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests are due, the first at 0.

    A Poisson process of `rate` requests a second; all at once if that is infinite.
    """
    if math.isinf(rate):
        return [0.0] * count
    random_ = random.Random(seed)
    gaps = [0.0, *(random_.expovariate(rate) for _ in range(count - 1))]
    return list(itertools.accumulate(gaps[:count]))


def token_prompts(count: int, length: int, seed: int, vocabulary: Sequence[int]) -> list[Prompt]:
    """`count` prompts of exactly `length` random token ids of `vocabulary`: no cache helps with them."""
    random_ = random.Random(seed)
    return [random_.choices(vocabulary, k=length) for _ in range(count)]


def word_prompts(count: int, length: int, seed: int) -> list[Prompt]:
    """`count` prompts of `length` random words, for servers whose tokens are not known.

    They come to about as many tokens; what the server counts is what is reported.
    """
    random_ = random.Random(seed)
    return [" ".join(random_.choices(_WORDS, k=length)) for _ in range(count)]
