from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.sampler import INVALID_TOKEN, SamplingRow, sample
from engine.sampling_params import SamplingParams

NOTHING = np.empty(0, np.int32)


def row(
    *,
    key: int = 7,
    position: int = 3,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    forbidden: tuple[int, ...] = (),
    target: int | None = None,
    **params: object,
) -> SamplingRow:
    return SamplingRow(
        request_id="r",
        params=SamplingParams(**params),  # type: ignore[arg-type]
        key=key,
        position=position,
        prompt_token_ids=np.asarray(prompt or [], np.int32),
        output_token_ids=np.asarray(output or [], np.int32),
        forbidden_token_ids=forbidden,
        target_token_id=target,
    )


def logits_of(*values: float) -> np.ndarray:
    return np.asarray([values], np.float32)


def draw(logits: np.ndarray, count: int, **params: object) -> np.ndarray:
    """How often each token is chosen at positions 0 … count - 1, as fractions."""
    rows = [row(position=position, **params) for position in range(count)]  # type: ignore[arg-type]
    tokens = sample(np.repeat(logits, count, axis=0), rows).token_ids
    return np.bincount(tokens, minlength=logits.shape[1]) / count


def support(logits: np.ndarray, **params: object) -> list[int]:
    """The tokens that are ever chosen."""
    return np.flatnonzero(draw(logits, 300, **params)).tolist()


finite_logits = hnp.arrays(np.float32, (3, 23), elements=st.floats(-30, 30, width=32))


@given(finite_logits)
def test_greedy_takes_the_largest_logit_and_of_equals_the_smallest_id(logits: np.ndarray) -> None:
    tokens = sample(logits, [row(temperature=0.0)] * 3).token_ids
    for index in range(3):
        assert tokens[index] == min(np.flatnonzero(logits[index] == logits[index].max()))
    assert tokens.dtype == np.int32


def test_no_rows() -> None:
    outcome = sample(np.empty((0, 5), np.float32), [])
    assert outcome.token_ids.shape == (0,)
    assert outcome.logprobs == []


def test_logits_are_left_as_they_are() -> None:
    logits = logits_of(1, 2, 3, 4)
    sample(logits, [row(logit_bias={0: 9.0}, repetition_penalty=2.0, prompt=[3], top_k=2, logprobs=1)])
    assert logits.tolist() == [[1, 2, 3, 4]]


def test_the_number_of_rows_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(np.zeros((2, 4), np.float32), [row()])


# -- random choice -----------------------------------------------------------------------------------------


def test_frequencies_follow_the_softmax() -> None:
    logits = logits_of(0.0, 1.0, 2.0, -1.0)
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(logits[0] / temperature)
        expected /= expected.sum()
        # Four standard deviations of a frequency over 4,000 draws.
        assert np.abs(draw(logits, 4000, temperature=temperature) - expected).max() < 4 * 0.5 / np.sqrt(4000)


@given(finite_logits, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_row_is_decided_by_itself_alone(logits: np.ndarray, key: int, position: int) -> None:
    wanted = row(key=key, position=position, temperature=0.8, top_p=0.9)
    alone = sample(logits[1:2], [wanted]).token_ids[0]
    others = [row(temperature=0.0, logprobs=3), wanted, row(key=1, top_k=3)]
    assert sample(logits, others).token_ids[1] == alone


def test_key_and_position_change_the_choice() -> None:
    logits = np.zeros((1, 1000), np.float32)
    chosen = {
        (key, position): int(sample(logits, [row(key=key, position=position)]).token_ids[0])
        for key in range(20)
        for position in range(20)
    }
    assert len(set(chosen.values())) > 250, "400 choices out of 1,000 equal tokens"


@given(finite_logits, st.integers(0, 100))
def test_the_last_bit_of_a_logit_hardly_ever_changes_the_choice(logits: np.ndarray, position: int) -> None:
    # Batched and single products round differently. The choice is by cumulative probability in the order of
    # the ids, so equal logits that exchange places in a sort cannot exchange the choice.
    tokens = sample(logits, [row(position=position)] * 3).token_ids
    nudged = np.nextafter(logits, np.float32(np.inf))
    probabilities = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    cumulative = (probabilities / probabilities.sum(axis=1, keepdims=True)).cumsum(axis=1)
    uniform = np.random.Generator(np.random.Philox(key=7, counter=position)).random()
    far_from_a_boundary = np.abs(cumulative - uniform).min(axis=1) > 1e-5
    again = sample(nudged, [row(position=position)] * 3).token_ids
    assert (tokens == again)[far_from_a_boundary].all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-310])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert support(logits_of(1.0, 1.5, 1.25), temperature=temperature) == [1]


# -- truncation --------------------------------------------------------------------------------------------


def test_top_k() -> None:
    logits = logits_of(0, 3, 1, 2, -1)
    assert support(logits, top_k=1) == [1]
    assert support(logits, top_k=3) == [1, 2, 3]
    assert (
        support(logits, top_k=0) == support(logits, top_k=-1) == support(logits, top_k=5) == [0, 1, 2, 3, 4]
    )


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log(np.asarray([[0.1, 0.4, 0.2, 0.3]], np.float32))
    assert support(logits, top_p=0.35) == [1]
    assert support(logits, top_p=0.45) == [1, 3]
    assert support(logits, top_p=0.8) == [1, 2, 3]
    assert support(logits, top_p=0.95) == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = np.log(np.asarray([[0.1, 0.4, 0.2, 0.3]], np.float32))
    assert support(logits, min_p=0.3) == [1, 2, 3]
    assert support(logits, min_p=0.6) == [1, 3]
    assert support(logits, min_p=1.0) == [1]


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log(np.asarray([[0.4, 0.3, 0.2, 0.1]], np.float32))
    # Of 0.4 and 0.3 the first is 57 %.
    assert support(logits, top_k=2, top_p=0.55) == [0]
    assert support(logits, top_k=2, top_p=0.6) == [0, 1]


@given(
    # On a grid: closer ones may be the same to float32 once the largest is taken off.
    hundredths=hnp.arrays(np.int32, (1, 31), elements=st.integers(-800, 800), unique=True),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 31),
    position=st.integers(0, 1000),
)
def test_truncation_agrees_with_sorting_everything(
    hundredths: np.ndarray, top_p: float, top_k: int, position: int
) -> None:
    logits = (hundredths / 100).astype(np.float32)
    order = np.argsort(-logits[0], kind="stable")[: top_k or None]
    probabilities = np.exp(logits[0, order].astype(np.float64) - logits.max())
    cumulative = probabilities.cumsum() / probabilities.sum()
    kept = order[: int(np.searchsorted(cumulative, top_p - 1e-9)) + 1]
    token = sample(logits, [row(position=position, top_p=top_p, top_k=top_k)]).token_ids[0]
    assert token in kept


# -- adjustments -------------------------------------------------------------------------------------------


def greedy(logits: np.ndarray, **options: object) -> int:
    return int(sample(logits, [row(temperature=0.0, **options)]).token_ids[0])  # type: ignore[arg-type]


def test_logit_bias() -> None:
    assert greedy(logits_of(1, 2, 3), logit_bias={0: 2.5}) == 0
    assert greedy(logits_of(1, 2, 3), logit_bias={2: -100.0}) == 1


@pytest.mark.parametrize("factor", [5e-324, 1e-300, 1e-39, 1e38, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_repetition_penalty_leaves_a_row_without_a_choice(factor: float, temperature: float) -> None:
    logits = logits_of(1e3, -2.0, 0.0, -np.inf)
    seen = [0, 1, 2, 3]
    [token] = sample(logits, [row(temperature=temperature, repetition_penalty=factor, prompt=seen)]).token_ids
    assert token in (0, 1, 2)
    greedy_token = greedy(logits_of(2.0, 1.0), repetition_penalty=factor, prompt=[0])
    assert greedy_token == (0 if factor < 1 else 1)


def test_repetition_penalty_shrinks_positive_and_grows_negative_logits() -> None:
    assert greedy(logits_of(1.0, 1.9, 2.0), repetition_penalty=1.2, prompt=[2]) == 1
    assert greedy(logits_of(-1.0, -1.1, -5.0), repetition_penalty=1.2, output=[0]) == 1
    assert greedy(logits_of(1.0, 1.9, 2.0), repetition_penalty=0.4, output=[0]) == 0


def test_presence_and_frequency_count_only_the_output() -> None:
    logits = logits_of(1.0, 1.9, 2.0)
    assert greedy(logits, presence_penalty=0.5, prompt=[2]) == 2
    assert greedy(logits, presence_penalty=0.5, output=[2]) == 1
    assert greedy(logits, frequency_penalty=0.04, output=[2]) == 2
    assert greedy(logits, frequency_penalty=0.04, output=[2, 2, 2]) == 1
    assert greedy(logits, presence_penalty=0.05, output=[2, 2, 2]) == 2, "presence counts once"


def test_forbidden_tokens_are_not_chosen() -> None:
    assert greedy(logits_of(1, 2, 3), forbidden=(2,)) == 1
    assert support(logits_of(1, 2, 3), forbidden=(1, 2)) == [0]


# -- logits that are not numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_damaged_row_yields_no_token_and_spares_the_others(bad: float, temperature: float) -> None:
    logits = np.asarray([[1, 2, 3], [1, bad, 3], [3, 2, 1]], np.float32)
    outcome = sample(logits, [row(temperature=temperature, top_k=1, logprobs=1)] * 3)
    assert outcome.token_ids.tolist() == [2, INVALID_TOKEN, 0]
    assert outcome.logprobs[1] is None
    assert outcome.logprobs[0] is not None


def test_a_row_without_any_possible_token_yields_none() -> None:
    assert greedy(np.full((1, 4), -np.inf, np.float32)) == INVALID_TOKEN
    assert greedy(logits_of(1, 2), forbidden=(0, 1)) == INVALID_TOKEN


def test_minus_infinity_is_a_logit() -> None:
    assert support(logits_of(-np.inf, 1, 1), top_p=0.99, top_k=3) == [1, 2]


# -- log probabilities -------------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float32, (1, 23), elements=st.floats(-30, 30, width=32), unique=True), st.integers(0, 23)
)
def test_logprobs_are_the_raw_logits_log_softmax(logits: np.ndarray, count: int) -> None:
    exact = logits[0].astype(np.float64)
    expected = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    outcome = sample(logits[:1], [row(temperature=0.3, top_k=4, logit_bias={5: 3.0}, logprobs=count)])
    found = outcome.logprobs[0]
    assert found is not None
    assert found.token_id == outcome.token_ids[0]
    np.testing.assert_allclose(found.logprob, expected[found.token_id], atol=1e-5)
    assert found.rank == 1 + int((exact > exact[found.token_id]).sum())
    assert found.top_token_ids.tolist() == np.argsort(-logits[0], kind="stable")[:count].tolist()
    np.testing.assert_allclose(found.top_logprobs, np.sort(expected)[::-1][:count], atol=1e-5)


def test_a_target_is_scored_and_not_chosen() -> None:
    outcome = sample(logits_of(1, 5, 2), [row(target=2, prompt_logprobs=1, temperature=0.0)])
    assert outcome.token_ids.tolist() == [2]
    found = outcome.logprobs[0]
    assert found is not None
    assert (found.token_id, found.rank, found.top_token_ids.tolist()) == (2, 2, [1])


def test_more_logprobs_than_tokens() -> None:
    outcome = sample(logits_of(1, 5, 2), [row(logprobs=20)])
    found = outcome.logprobs[0]
    assert found is not None
    assert found.top_token_ids.tolist() == [1, 2, 0]
