"""Load against a real server, one that misbehaves, and one whose speed is known."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.benchmark.load import LoadSettings, Outcome, arrivals, random_prompts, run_load
from app.benchmark.report import percentile, report, report_lines
from tests.app.hostile_server import chunk, events, hostile_server, response

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.app.local_server", str(checkpoint), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def run(url: str, **fields: object) -> tuple[list[Outcome], float]:
    settings = LoadSettings(base_url=url, model="m", **fields)  # type: ignore[arg-type]
    prompts = random_prompts(4, 8, 1, as_text=settings.chat)
    return anyio.run(run_load, settings, prompts, lambda done, total: None)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], rank: int) -> None:
    assert math.isclose(percentile(values, rank), np.percentile(values, rank), rel_tol=1e-9, abs_tol=1e-9)


def test_arrivals_are_a_poisson_process() -> None:
    due = arrivals(20_000, 50.0, 7)
    gaps = np.diff(due)
    assert due[0] == 0
    assert due == arrivals(20_000, 50.0, 7) != arrivals(20_000, 50.0, 8)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)
    assert arrivals(3, math.inf, 1) == [0, 0, 0]


def test_prompts_share_no_beginning() -> None:
    prompts = random_prompts(100, 32, 3, as_text=False)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 100
    assert all(len(prompt) == 32 for prompt in prompts)


def test_the_figures_are_the_definitions() -> None:
    outcome = Outcome(due=1.0, begun=2.0, ended=5.0, output_tokens=4, token_times=[2.5, 3.0, 5.0])
    assert outcome.first_token == 0.5
    assert outcome.per_output_token == pytest.approx(2.5 / 3)
    assert outcome.gaps == [0.5, 2.0]
    assert (outcome.latency, outcome.latency_from_due) == (3.0, 4.0)
    failed = Outcome(due=0, begun=0, ended=1, error="no")
    figures = report(LoadSettings("u", "m"), [outcome, failed], 10.0)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (1, 1, {"no": 1})
    assert figures["output_tokens_per_second"] == 0.4
    assert figures["ttft_ms"]["p99"] == 500
    assert figures["latency_from_due_ms"]["mean"] == 4000
    assert "1 x no" in report_lines(figures)


@pytest.mark.parametrize("chat", [False, True])
def test_a_real_server(url: str, chat: bool) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    settings = LoadSettings(base_url=url, model=model, chat=chat, output_tokens=6, max_concurrency=2)
    prompts = [prompt if chat else [token % 400 + 50 for token in prompt]
               for prompt in random_prompts(4, 8, 1, as_text=chat)]  # fmt: skip
    outcomes, seconds = anyio.run(run_load, settings, prompts, lambda done, total: None)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.output_tokens for outcome in outcomes] == [6] * 4
    figures = report(settings, outcomes, seconds)
    assert figures["most_at_once"] <= 2
    assert figures["output_tokens"] == 24
    if not chat:
        assert figures["prompt_tokens"] == 32


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (response(b'{"error": {"message": "too many"}}', status="429 Too Many Requests"), "429: too many"),
        (response(b"oops", status="500 Internal Server Error"), "500: oops"),
        (events(chunk("a", chat=False)), "the stream ended before the completion did"),
        (events(chunk("a", chat=False), length=9999), "peer closed connection"),
        (events({"error": {"message": "it died"}}), "it died"),
        (events([1]), "not OpenAI's protocol"),
        (events({"usage": 3}), "not OpenAI's protocol"),
    ],
)
def test_what_a_server_does_wrong_is_counted(answer: bytes, expected: str) -> None:
    with hostile_server(answer) as url:
        outcomes, _ = run(url)
    assert len(outcomes) == 4
    assert all(expected in str(outcome.error) for outcome in outcomes)


def test_a_server_that_hangs_is_given_up() -> None:
    with hostile_server(events(chunk("a", chat=False)), hang=60) as url:
        outcomes, _ = run(url, timeout=0.3)
    assert {outcome.error for outcome in outcomes} == {"no byte for 0.3 s"}


def test_the_command(url: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nworld\n")
    result = tmp_path / "result.json"
    flags = ["--base-url", url, "--num-prompts", "3", "--random-output-len", "4", "--dataset-path", str(file)]
    command = [sys.executable, "-m", "app.cli", "bench", "serve", *flags]
    done = subprocess.run(
        [*command, "--output", "json", "--result-filename", str(result)],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads(done.stdout)
    assert figures == json.loads(result.read_text())
    assert figures["completed"] == 3
    refused = subprocess.run([*command, "--request-rate", "nan"], capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2
    gone = subprocess.run(
        [*command[: -len(flags)], "--base-url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert gone.returncode == 1
    assert gone.stderr.startswith("Error: http://127.0.0.1:9: ")
