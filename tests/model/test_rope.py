"""Frequencies of rotary embeddings: transformers' own, and the papers' formulas worked out by themselves.

The pinned numbers are those of transformers 5.24 (``ROPE_INIT_FUNCTIONS``, float32, heads of 32).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.config import RopeConfig
from engine.model.json_fields import Fields
from engine.model.read_rope import read_rope
from engine.model.rope import inverse_frequencies

HEAD_DIM = 32
YARN_40 = [
    *(1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.056234129, 0.027218176, 0.012829017),
    *(0.0058214283, 0.0024903687, 0.00095997716, 0.00029214591, 2.4999999e-05, 1.4058533e-05),
    *(7.9056945e-06, 4.4456983e-06),
]
PINNED: list[tuple[dict[str, Any], list[float], float]] = [
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        [
            *(1.0, 0.42169651, 0.17782794, 0.074989416, 0.031622779, 0.013335215, 0.0047799014),
            *(0.0016599617, 0.00055, 0.00016867858, 4.4456985e-05, 1.8747356e-05, 7.9056936e-06),
            *(3.3338035e-06, 1.4058534e-06, 5.9284343e-07),
        ],
        1.138629436111989,
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
        [
            *(1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.056234129, 0.031622779, 0.015371677),
            *(0.0062218891, 0.0021367003, 0.00043557558, 0.00022228493, 0.00012500001, 7.0292663e-05),
            *(3.9528473e-05, 2.2228493e-05),
        ],
        1.2079441541679836,
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        YARN_40,
        1.0879546075066122,
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
        },
        YARN_40,
        1.3688879454113936,
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 2048,
        },
        [
            *(1.0, 0.42169651, 0.17782794, 0.067490473, 0.025298223, 0.0093346499, 0.003374048),
            *(0.0011856869, 0.00050000002, 0.00021084824, 8.891397e-05, 3.7494712e-05, 1.5811387e-05),
            *(6.6676071e-06, 2.8117067e-06, 1.1856869e-06),
        ],
        1.25,
    ),
    (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        [
            *(1.0, 0.44036663, 0.19392276, 0.085397102, 0.037606031, 0.016560441, 0.0072926651),
            *(0.0032114461, 0.00052484602, 7.7846555e-05, 3.4281024e-05, 1.5096218e-05, 6.6478697e-06),
            *(2.9274997e-06, 1.2891732e-06, 5.6770881e-07),
        ],
        1.0,
    ),
    (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        [
            *(0.25, 0.14058533, 0.079056941, 0.044456985, 0.025, 0.014058532, 0.0079056947),
            *(0.0044456986, 0.0024999999, 0.0014058533, 0.00079056947, 0.00044456986, 0.00025000001),
            *(0.00014058533, 7.9056947e-05, 4.4456985e-05),
        ],
        1.0,
    ),
]


@pytest.mark.parametrize(("parameters", "frequencies", "magnitude"), PINNED)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_numbers_are_those_of_transformers(
    parameters: dict[str, Any], frequencies: list[float], magnitude: float, spelling: str
) -> None:
    """In transformers 5's spelling, 4's, and the one before ``rope_type``."""
    raw: dict[str, Any] = {"max_position_embeddings": 131072, "rope_parameters": parameters}
    if spelling != "rope_parameters":
        scaling = dict(parameters)
        raw = {
            "max_position_embeddings": 131072,
            "rope_theta": scaling.pop("rope_theta"),
            "rope_scaling": scaling,
        }
        if spelling == "type":
            scaling["type"] = scaling.pop("rope_type")
    rope = read_rope(Fields(raw, "config.json"), "config.json")
    found = inverse_frequencies(rope, HEAD_DIM)
    assert found.dtype == np.float32
    # float32 rounds an exponent, and the power makes more of it: theta ** (1 ± 1e-7).
    np.testing.assert_allclose(found, frequencies, rtol=2e-6)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)


def yarn_by_the_paper(
    theta: float, head_dim: int, length: int, scale: float, fast: float, slow: float
) -> list[float]:
    """Peng et al. 2023, section 3.2 ("NTK-by-parts"): ``(1 - gamma) * h / s + gamma * h``.

    As in the authors' code, the ramp gamma is linear in the dimension, between whole dimensions: those that
    turn `fast` and `slow` times over the original length, ``turns = L * theta ** (-2 d / D) / 2 pi``.
    """

    def dimension(turns: float) -> float:
        return head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), head_dim - 1)
    frequencies = []
    for d in range(head_dim // 2):
        exact = theta ** (-2 * d / head_dim)
        if d <= low:
            gamma = 1.0
        elif d >= high:
            gamma = 0.0
        else:
            gamma = 1 - (d - low) / (high - low)
        frequencies.append((1 - gamma) * exact / scale + gamma * exact)
    return frequencies


@settings(deadline=None, max_examples=100)
@given(
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    head_dim=st.sampled_from([64, 80, 128]),
    length=st.sampled_from([2048, 4096, 32768]),
    scale=st.floats(1.0, 64.0),
)
def test_yarn_is_the_papers(theta: float, head_dim: int, length: int, scale: float) -> None:
    rope = RopeConfig(theta, "yarn", factor=scale, original_max_position_embeddings=length)
    expected = yarn_by_the_paper(theta, head_dim, length, scale, 32, 1)
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), expected, rtol=3e-6)


def test_yarns_ends() -> None:
    """What turns often keeps its frequency, what turns less than once is divided."""
    rope = RopeConfig(1e4, "yarn", factor=16.0, original_max_position_embeddings=4096)
    plain, scaled = (inverse_frequencies(r, 128) for r in (RopeConfig(1e4), rope))
    turns = 4096 * plain / (2 * np.pi)
    often, seldom = turns > 40, turns < 0.8
    assert often.any()
    assert seldom.any()
    np.testing.assert_array_equal(scaled[often], plain[often])
    np.testing.assert_allclose(scaled[seldom], plain[seldom] / 16, rtol=1e-6)


def test_a_step_is_no_division_by_zero() -> None:
    rope = RopeConfig(
        1e4,
        "yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=2.0,
        beta_slow=2.0,
        truncate=False,
    )
    found = inverse_frequencies(rope, 32)
    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
