"""A server on a real port, and how it stops."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.serving import bind, url_of
from engine.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "extra_body": {"ignore_eos": True}}


@dataclass
class Running:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=60)

    def end(self) -> tuple[int, str]:
        """Its status and what it said, once it has ended."""
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return self.process.returncode, out + err


Start = Callable[[float], Running]


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    processes = []

    def begin(shutdown_timeout: float) -> Running:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.app.local_server", str(checkpoint), str(shutdown_timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        processes.append(process)
        assert process.stdout is not None
        return Running(process, process.stdout.readline().strip())

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_it_drains_on_the_first_signal(start: Start) -> None:
    running = start(60)
    asked: dict[str, Any] = {**LONG, "max_tokens": 40}
    stream = running.client.completions.create(prompt="hello", stream=True, **asked)
    chunks = [next(stream)]
    running.process.send_signal(signal.SIGTERM)
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    status, said = running.end()
    assert status == 0
    assert "SIGTERM" in said


def test_it_takes_no_new_connection_while_it_drains(start: Start) -> None:
    running = start(60)
    stream = running.client.completions.create(prompt="hello", stream=True, **{**LONG, "max_tokens": 60})
    next(stream)
    running.process.send_signal(signal.SIGINT)
    assert running.process.stdout is not None
    assert "SIGINT" in running.process.stdout.readline()
    for _ in stream:
        try:
            httpx.get(f"{running.url}/health")
        except httpx.TransportError:
            break
    else:
        raise AssertionError("it took connections to the end")
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert running.end()[0] == 0


def test_what_outlasts_the_timeout_ends_with_an_error(start: Start) -> None:
    running = start(0.1)
    stream = running.client.completions.create(prompt="hello", stream=True, **LONG)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(running.client.completions.create, prompt="bye", **LONG)
        while 'num_requests_running{model_name="tiny"} 2.0' not in httpx.get(f"{running.url}/metrics").text:
            next(stream)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        error = whole.exception(timeout=60)
    assert isinstance(error, openai.InternalServerError)
    assert error.status_code == 503
    assert running.end()[0] == 0


def test_a_second_signal_is_immediate(start: Start) -> None:
    running = start(600)
    stream = running.client.completions.create(prompt="hello", stream=True, **LONG)
    next(stream)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.stdout is not None
    assert "SIGTERM" in running.process.stdout.readline()
    running.process.send_signal(signal.SIGTERM)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        list(stream)
    status, said = running.end()
    assert status == 128 + signal.SIGTERM
    assert "at once" in said


def test_without_an_engine_it_ends_with_status_1(start: Start) -> None:
    running = start(600)
    assert httpx.post(f"{running.url}/test/exhaust").status_code == 200
    assert running.end()[0] == 1


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigurationError, match=f"--port {port}: Address already in use"):
            bind("127.0.0.1", port)


def test_a_host_that_is_none_is_said_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"--host no\.such\.host\.invalid: "):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigurationError, match=r"--host 192\.0\.2\.1: "):
        bind("192.0.2.1", 0)


def test_an_ipv6_address_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = bind("::1", 0)
    except ConfigurationError as error:
        pytest.skip(str(error))
    with listener:
        assert url_of(listener).startswith("http://[::1]:")
