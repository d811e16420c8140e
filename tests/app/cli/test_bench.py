"""``vtserve bench serve`` as a command: against a real server, and ones that misbehave."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.benchmark.load import LoadSettings
from app.cli.bench_run import make_prompts
from tests.app.hostile_server import chunk, events, hostile_server, response, usage

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "app.cli", "bench", "serve"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "VTSERVE_API_KEY"}
GOOD = events(chunk("a", chat=False), chunk("b", chat=False, finish="length"), usage(5, 2), "[DONE]")


def run(*flags: str, said: str = "", cwd: Path = ROOT, **keywords: Any) -> subprocess.CompletedProcess[str]:
    environ = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*COMMAND, *flags], input=said, capture_output=True, text=True, cwd=cwd, env=environ, timeout=120,
        **keywords,
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.app.local_server", str(checkpoint), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_random_tokens_are_as_many_as_asked_for(url: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    flags = ["--num-prompts", "6", "--request-rate", "200", "--random-input-len", "20", "--ignore-eos"]
    done = run("--base-url", f"{url}/v1", *flags, "--random-output-len", "4", "--output", "json",
               "--result-filename", str(result), "--save-detailed", "--seed", "5")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bar where there is no terminal"
    figures = json.loads(done.stdout)
    assert figures == json.loads(result.read_text())
    assert (figures["completed"], figures["failed"], figures["num_prompts"]) == (6, 0, 6)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (6 * 20, 6 * 4)
    assert (figures["request_rate"], figures["seed"], figures["backend"]) == (200, 5, "openai")
    for name in ("ttft", "tpot", "itl", "e2el", "ttft_from_arrival", "e2el_from_arrival"):
        assert 0 < figures[f"p50_{name}_ms"] <= figures[f"p90_{name}_ms"] <= figures[f"p99_{name}_ms"]
    assert figures["input_lens"] == [20] * 6
    assert figures["arrival_times"] == sorted(figures["arrival_times"])


def test_conversations_with_prompts_of_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\nworld\n")
    host, port = url.removeprefix("http://").split(":")
    flags = ["--host", host, "--port", port, "--endpoint", "/v1/chat/completions", "--num-prompts", "3"]
    done = run(*flags, "--dataset-path", str(file), "--random-output-len", "3", "--save-result", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 requests completed, 0 failed, in ")
    [saved] = tmp_path.glob("vtserve-infqps-*.json")
    assert json.loads(saved.read_text())["backend"] == "openai-chat"
    with hostile_server(GOOD) as server:
        piped = ["--base-url", server.url, "--dataset-path", "-", "--num-prompts", "3", "--num-warmups", "0"]
        assert run(*piped, "--max-concurrency", "1", said="one\ntwo\n").returncode == 0
        prompts = [json.loads(body)["prompt"] for _, body in server.requests]
    assert prompts == ["one", "two", "one"]


def test_words_where_the_server_does_not_tell_its_tokens() -> None:
    with hostile_server(response(b"", status="404 Not Found")) as server:
        prompts = make_prompts(LoadSettings(server.url, "m"), 3, 10, None)
        assert [path for path, _ in server.requests] == ["/tokenize"]
        assert all(isinstance(prompt, str) and len(prompt.split()) == 10 for prompt in prompts)
        conversation = LoadSettings(server.url, "m", endpoint="/v1/chat/completions")
        assert make_prompts(conversation, 3, 10, None) == prompts
        assert len(server.requests) == 1
    with hostile_server(response(b'{"tokens": [7, 9, 7]}')) as server:
        ids = make_prompts(LoadSettings(server.url, "m"), 3, 10, None)
    assert {token for prompt in ids for token in prompt} == {7, 9}


def test_errors_are_counted_and_shown() -> None:
    refusal = response(b'{"error": {"message": "too many"}}', status="429 Too Many Requests")
    flags = ["--model", "m", "--dataset-path", "-", "--num-prompts", "5", "--max-concurrency", "1"]
    with hostile_server(refusal, first=[GOOD, GOOD, GOOD]) as server:
        done = run("--base-url", server.url, *flags, said="hello\n")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 requests completed, 3 failed, in "), "the first of all was a warm-up"
    assert "3 x 429: too many" in lines
    assert done.stderr == "Error: 3 of 5 requests failed\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (response(b'{"error": {"message": "no key"}}', status="401 Unauthorized"), "401: no key"),
        (response(b"oops", status="500 Internal Server Error"), "500: oops"),
        (events(chunk("a", chat=False)), "the stream ended before the answer did"),
        (b"what is this\r\n\r\n", "illegal status line"),
    ],
)
def test_a_warm_up_that_fails_is_one_line(answer: bytes, expected: str) -> None:
    with hostile_server(answer) as server:
        done = run("--base-url", server.url, "--model", "m", "--dataset-path", "-", said="hello\n")
        assert len(server.requests) == 1
    assert done.returncode == 1
    assert done.stderr == f"Error: {server.url}: {done.stderr.partition(server.url)[2][2:]}"
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_no_server_is_one_line() -> None:
    for flags in ([], ["--model", "m"], ["--model", "m", "--endpoint", "/v1/chat/completions"]):
        done = run("--base-url", "http://127.0.0.1:9", *flags)
        assert done.returncode == 1
        assert done.stderr.startswith("Error: http://127.0.0.1:9: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--request-rate", "nan"], "--request-rate"),
        (["--request-rate", "0"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--base-url", "ftp://a"], "--base-url ftp://a: expected a URL"),
        (["--host", "a b"], "--host"),
        (["--endpoint", "chat"], "--endpoint"),
        (["--api-key", "a b"], "--api-key"),
        (["--result-filename", "/nowhere/x.json"], "--result-filename /nowhere/x.json"),
        (["--model", "m", "--dataset-path", "/nowhere"], "--dataset-path"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags: list[str], expected: str) -> None:
    done = run(*flags)
    assert done.returncode == 2, done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert expected in error


def test_a_full_disk_does_not_lose_the_figures() -> None:
    with hostile_server(GOOD) as server:
        done = run("--base-url", server.url, "--model", "m", "--dataset-path", "-", "--num-prompts", "1",
                   "--result-filename", "/dev/full", said="one\n")  # fmt: skip
    assert done.returncode == 1
    assert "1 requests completed" in done.stdout
    assert done.stderr.splitlines()[-1] == "Error: /dev/full: No space left on device"


def test_ctrl_c_tells_of_what_was_done() -> None:
    flags = ["--model", "m", "--dataset-path", "-", "--num-prompts", "50", "--max-concurrency", "1"]
    with hostile_server(b"", hang=60, first=[GOOD] * 5) as server:
        process = subprocess.Popen(
            [*COMMAND, "--base-url", server.url, *flags, "--output", "json"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(b"hello\n")
        process.stdin.close()
        process.stdin = None
        # One at a time: when the sixth comes, five have ended, one of them the warm-up.
        server.wait_for(6)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""
    figures = json.loads(out)
    assert (figures["completed"], figures["failed"], figures["unfinished"]) == (4, 0, 46)
    assert figures["total_output_tokens"] == 8


def test_the_help_fits_a_screen() -> None:
    lines = run("--help").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "--save-detailed" in run("--help-all").stdout


def test_ctrl_c_before_anything_was_done() -> None:
    with hostile_server(b"", hang=60) as server:
        flags = ["--base-url", server.url, "--model", "m", "--endpoint", "/v1/chat/completions"]
        process = subprocess.Popen(
            [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT
        )
        server.wait_for(1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


def test_the_bar_is_on_a_terminals_stderr() -> None:
    ours, theirs = pty.openpty()
    with hostile_server(GOOD) as server:
        flags = ["--base-url", server.url, "--model", "m", "--endpoint", "/v1/chat/completions"]
        done = subprocess.run(
            [*COMMAND, *flags, "--num-prompts", "3", "--output", "json"],
            stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, timeout=120,
            env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "80"},
        )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert json.loads(done.stdout)["num_prompts"] == 3
    assert "requests" in shown


def test_more_connections_than_open_files_are_usual() -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))

    flags = ["--model", "m", "--endpoint", "/v1/chat/completions", "--num-prompts", "150"]
    with hostile_server(GOOD) as server:
        done = run("--base-url", server.url, *flags, preexec_fn=few_files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("150 requests completed, 0 failed")
