from __future__ import annotations

import math

import msgspec
import pytest

from engine.errors import RequestError
from engine.sampling_params import MAX_N, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("n", 0),
        ("n", MAX_N + 1),
        ("n", 10**9),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens 5: expected at most max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_convenient_spellings() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1, temperature=0, seed=-(2**63)).temperature == 0


def test_what_arrives_in_another_process_is_equal_and_checked() -> None:
    params = SamplingParams(stop=("a", "b"), logit_bias={5: -1.5}, seed=2**64 - 1, temperature=0.25)
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    with pytest.raises(RequestError, match="top_p"):
        msgspec.json.decode(b'{"top_p": 7}', type=SamplingParams)
