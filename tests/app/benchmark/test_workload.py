"""What is asked, and when."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.benchmark.workload import arrival_times, token_prompts, word_prompts


def test_arrivals_are_a_poisson_process() -> None:
    rate, count = 50.0, 20_000
    due = arrival_times(count, rate, 7)
    gaps = np.diff(due)
    assert due[0] == 0
    assert due == arrival_times(count, rate, 7) != arrival_times(count, rate, 8)
    assert np.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    # Exponential: the share of gaps over t is exp(-rate t).
    for share in (0.9, 0.5, 0.1, 0.01):
        assert np.mean(gaps > -math.log(share) / rate) == pytest.approx(share, rel=0.2)
    # Poisson: as much variance as mean in the count of each second.
    counts = np.bincount(np.array(due, dtype=int))[:-1]
    assert np.var(counts) == pytest.approx(np.mean(counts), rel=0.2)


@given(st.integers(1, 50), st.floats(1e-3, 1e6), st.integers(0, 2**32))
def test_arrivals_are_in_order(count: int, rate: float, seed: int) -> None:
    due = arrival_times(count, rate, seed)
    assert len(due) == count
    assert due == sorted(due)
    assert arrival_times(count, math.inf, seed) == [0.0] * count


@given(st.integers(1, 20), st.integers(1, 50), st.integers(0, 2**32))
def test_prompts_have_their_length(count: int, length: int, seed: int) -> None:
    tokens = token_prompts(count, length, seed, [3, 5, 9])
    assert [len(prompt) for prompt in tokens] == [length] * count
    assert {token for prompt in tokens for token in prompt} <= {3, 5, 9}
    words = word_prompts(count, length, seed)
    assert all(isinstance(prompt, str) and len(prompt.split()) == length for prompt in words)
    assert words == word_prompts(count, length, seed)
    assert tokens == token_prompts(count, length, seed, [3, 5, 9])


def test_prompts_share_no_beginning() -> None:
    """A KV cache shares blocks of equal beginnings; 16 tokens make one."""
    prompts = token_prompts(200, 32, 3, range(60))
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 200
    words = word_prompts(200, 32, 3)
    assert len({tuple(str(prompt).split()[:16]) for prompt in words}) == 200
