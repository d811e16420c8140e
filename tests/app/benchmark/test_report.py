"""Figures, against their definitions and the standard library's statistics."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.benchmark.load import LoadSettings
from app.benchmark.outcome import Outcome
from app.benchmark.report import details, report, report_lines

SETTINGS = LoadSettings("http://a", "m", rate=2.0, seed=3, api_key="secret")
GOOD = Outcome(
    due=1.0,
    begun=2.0,
    ended=6.0,
    prompt_tokens=10,
    output_tokens=4,
    has_usage=True,
    token_times=[2.5, 3.0, 5.0],
)
BAD = Outcome(due=0.5, begun=0.5, ended=2.0, error="500: no", token_times=[1.0, 2.0], output_tokens=99)


def test_latencies_are_the_definitions() -> None:
    assert GOOD.ttft == 0.5
    assert GOOD.ttft_from_arrival == 1.5
    assert GOOD.tpot == pytest.approx(2.5 / 3), "from the first token to the last, over the tokens after it"
    assert GOOD.inter_token_latencies == [0.5, 2.0]
    assert (GOOD.latency, GOOD.latency_from_arrival, GOOD.start_delay) == (4.0, 5.0, 1.0)
    one = Outcome(due=0, begun=0, ended=1, output_tokens=1, token_times=[1.0])
    assert (one.ttft, one.tpot, one.inter_token_latencies) == (1.0, None, [])
    none = Outcome(due=0, begun=0, ended=1)
    assert (none.ttft, none.ttft_from_arrival, none.tpot) == (None, None, None)


def test_figures() -> None:
    figures = report(SETTINGS, [GOOD, BAD], 10.0, unfinished=1)
    assert json.loads(json.dumps(figures)) == figures
    assert "secret" not in json.dumps(figures)
    expected = {
        "num_prompts": 3,
        "completed": 1,
        "failed": 1,
        "unfinished": 1,
        "error_counts": {"500: no": 1},
        "total_input_tokens": 10,
        "total_output_tokens": 4,
        "request_throughput": 0.1,
        "output_throughput": 0.4,
        "total_token_throughput": 1.4,
        "max_concurrent_requests": 1,
        "request_rate": 2.0,
        "p99_ttft_ms": 500.0,
        "mean_itl_ms": 1250.0,
        "max_itl_ms": 2000.0,
        "mean_e2el_ms": 4000.0,
        "median_e2el_from_arrival_ms": 5000.0,
        "mean_start_delay_ms": 500.0,
    }
    assert {name: figures[name] for name in expected} == expected
    assert report(LoadSettings("u", "m"), [GOOD], 1.0)["request_rate"] == "inf"


@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=60))
def test_distributions_are_those_of_the_standard_library(latencies: list[float]) -> None:
    outcomes = [Outcome(due=0, begun=0, ended=latency) for latency in latencies]
    figures = report(SETTINGS, outcomes, 1.0)
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    expected = {
        "mean": statistics.fmean(latencies),
        "median": statistics.median(latencies),
        "std": statistics.pstdev(latencies),
        "p50": cuts[49],
        "p90": cuts[89],
        "p99": cuts[98],
        "max": max(latencies),
    }
    for name, value in expected.items():
        assert math.isclose(figures[f"{name}_e2el_ms"], 1000 * value, rel_tol=1e-6, abs_tol=1e-3), name


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_the_most_at_once_is_the_most_at_any_time(spans: list[tuple[int, int]]) -> None:
    outcomes = [Outcome(due=0, begun=begin, ended=begin + length) for begin, length in spans]
    most = max(sum(o.begun <= at + 0.5 < o.ended for o in outcomes) for at in range(-1, 41))
    assert report(SETTINGS, outcomes, 1.0)["max_concurrent_requests"] == most


def test_every_request() -> None:
    lists = details([GOOD, BAD])
    assert lists["arrival_times"] == [0.5, 1.0]
    assert lists["errors"] == ["500: no", ""]
    assert lists["itls"] == [[1.0], [0.5, 2.0]]
    assert {len(values) for values in lists.values()} == {2}


def test_the_table() -> None:
    lines = report_lines(report(SETTINGS, [GOOD, BAD], 10.0, unfinished=2))
    assert lines[0].startswith("1 requests completed, 1 failed, 2 unfinished, in 10.00 s")
    assert "1 x 500: no" in lines
    [ttft] = [line for line in lines if line.startswith("time to first token")]
    assert ttft.split()[-5:] == ["500.0"] * 5
    assert any(line.startswith("note: this client could not keep up") for line in lines)
    limited = LoadSettings("http://a", "m", max_concurrency=1)
    assert not any("keep up" in line for line in report_lines(report(limited, [GOOD], 10.0)))


def test_a_table_of_failures_alone_and_of_many_kinds() -> None:
    outcomes = [Outcome(due=0, begun=0, ended=1, error=f"500: {number}") for number in range(30)]
    lines = report_lines(report(SETTINGS, outcomes, 1.0))
    assert not any("TTFT" in line for line in lines)
    assert lines[-1] == "… and 20 other errors; --output json has all"
    without = Outcome(due=0, begun=0, ended=1, output_tokens=3, token_times=[0.5])
    assert any("without usage" in line for line in report_lines(report(SETTINGS, [without], 1.0)))
