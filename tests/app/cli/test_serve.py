"""``vtserve serve`` as a process, over an engine in a process, asked by the official client."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import faulty_engine

ROOT = Path(__file__).resolve().parents[3]
FLAGS = [
    "--device",
    "cpu",
    "--threads",
    "1",
    "--kv-cache-memory",
    "16MiB",
    "--max-model-len",
    "512",
    "--port",
    "0",
]


@dataclass
class Server:
    """A server in a process of its own, with its group, so that nothing of it is left."""

    process: subprocess.Popen[str]
    url: str
    client: openai.OpenAI

    def engines(self) -> list[int]:
        """Processes whose parent it is."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def wait_ready(self) -> None:
        for _ in range(600):
            if httpx.get(f"{self.url}/health").status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError("it never was ready")

    def end(self) -> tuple[int, str]:
        """Its status and what it said, once it has ended."""
        _, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return self.process.returncode, err


Start = Callable[..., Server]


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    servers = []

    def begin(*flags: str, model: Path = checkpoint, ready: bool = True, limit: int = 0) -> Server:
        named = ["--failure-dir", str(tmp_path / "failures"), "--served-model-name", "tiny"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.app.faulty_server", str(model), *FLAGS, *named, *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            preexec_fn=lambda: limit and resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("listening on http://"), line + process.stderr.read()
        url = line.split()[2].rstrip(";")
        client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0, timeout=60)
        server = Server(process, url, client)
        servers.append(server)
        if ready:
            server.wait_ready()
        return server

    yield begin
    for server in servers:
        server.client.close()
        server.process.kill()
        server.process.communicate()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_gone(pid: int) -> None:
    for _ in range(400):
        if not is_alive(pid):
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} is still there")


def test_it_answers_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    server = start("--alloc-trace")
    asked: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4, "temperature": 0}
    ignore = {"ignore_eos": True}
    completion = server.client.completions.create(**asked, extra_body=ignore)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4
    chunks = list(server.client.completions.create(**asked, extra_body=ignore, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text
    [engine] = server.engines()
    assert list(tmp_path.glob("vtserve-*/trace"))
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert not is_alive(engine)
    assert not list(tmp_path.glob("vtserve-*"))


def test_a_client_that_goes_frees_its_blocks(start: Start) -> None:
    server = start()

    def usage() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
        return float(lines[0].split()[-1]) if lines else 0.0

    stream = server.client.completions.create(
        model="tiny",
        prompt=[faulty_engine.SLOW, 6],
        max_tokens=500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    assert usage() > 0
    stream.close()
    # The figures are those of the last step; one more request makes one.
    server.client.completions.create(model="tiny", prompt=[5], max_tokens=2)
    assert usage() == 0


def test_killing_the_server_ends_the_engine(start: Start) -> None:
    server = start()
    [engine] = server.engines()
    server.process.kill()
    wait_gone(engine)
    server = start(ready=False)
    while not (engines := server.engines()):
        time.sleep(0.01)
    server.process.kill()
    wait_gone(engines[0])


def test_a_stopped_engine_does_not_outlive_the_server(start: Start) -> None:
    server = start("--shutdown-timeout", "0.1")
    [engine] = server.engines()
    os.kill(engine, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert not is_alive(engine)


def test_a_second_signal_ends_everything_at_once(start: Start) -> None:
    server = start("--shutdown-timeout", "600")
    [engine] = server.engines()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            server.client.completions.create, model="tiny", prompt=[faulty_engine.HANGS], max_tokens=9
        )
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        assert any("waiting" in line for line in server.process.stderr)
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 128 + signal.SIGTERM
        assert isinstance(asked.exception(timeout=30), openai.OpenAIError)
    assert not is_alive(engine)


def test_it_outlives_its_engine_until_no_restart_is_left(start: Start) -> None:
    server = start("--max-engine-restarts", "1")
    for turn in range(2):
        [engine] = server.engines()
        stream = server.client.completions.create(
            model="tiny",
            prompt=[faulty_engine.SLOW],
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError) as ended:
            list(stream)
        body: Any = ended.value.body
        failure_id = body["failure_id"]
        assert failure_id in str(ended.value)
        if turn == 0:
            health = httpx.get(f"{server.url}/health")
            assert health.status_code == 503
            assert failure_id in health.text
            record = httpx.get(f"{server.url}/debug/alloc/failures/{failure_id}").json()
            assert "SIGKILL" in record["what"]
            server.wait_ready()
    status, said = server.end()
    assert status == 1
    assert said.count("engine-fatal: EngineCore busy loop ended: ") == 2
    assert "Error: the engine stopped and is not started again; failure record: " in said


def test_memory_that_the_load_lacks_is_served_as_a_record(start: Start) -> None:
    flags = ["--device-memory", "20MiB", "--max-engine-restarts", "1", "--alloc-trace", "--no-plan"]
    server = start(*flags, ready=False)
    for _ in range(600):
        failures = httpx.get(f"{server.url}/debug/alloc/failures").json()["failures"]
        if failures:
            break
        time.sleep(0.05)
    assert failures[0]["why"] == "full"
    assert httpx.get(f"{server.url}/health").status_code == 503
    record = httpx.get(f"{server.url}/debug/alloc/failures/{failures[0]['id']}").json()
    assert record["levers"]
    assert record["allocation"]["tag"].startswith("kv/")
    assert any("FAILED" in line for line in record["trace"])
    assert "FAILED" in httpx.get(f"{server.url}/debug/alloc").text, "it works while the engine is dead"
    status, said = server.end()
    assert status == 1
    assert said.count("engine-fatal: to make it fit: ") == 2


def test_what_does_not_fit_is_not_served(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--device-memory", "20MiB", "--failure-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", str(checkpoint), *FLAGS, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    failed, what, levers, last = done.stderr.splitlines()
    assert failed.startswith("[host-alloc] FAILED #")
    assert failed.endswith(" planned=yes")
    assert " would fail: out of memory" in what
    assert levers.startswith("engine-fatal: to make it fit: ")
    assert last.startswith("Error: nothing was loaded")
    assert last.endswith(f"failure record: {next(tmp_path.iterdir())}")


@pytest.mark.parametrize(
    ("flags", "status", "expected"),
    [
        (["--max-model-len", "100000"], 2, "--max-model-len 100000"),
        (["--port", "70000"], 2, "--port"),
        (["--api-key-file", "/nowhere"], 2, "--api-key-file"),
        (["--host", "not a host"], 2, "--host"),
        (["--model", "other"], 2, "MODEL"),
        (["--kv-cache-memory", "lots"], 2, "--kv-cache-memory"),
        (["--tensor-parallel-size", "2"], 2, "--tensor-parallel-size"),
    ],
)
def test_a_flag_that_cannot_be_used_is_one_line(
    checkpoint: Path, flags: list[str], status: int, expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", str(checkpoint), *FLAGS, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", [None, "", " , "])
def test_a_key_that_is_required_and_missing_is_one_line(checkpoint: Path, variable: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "VTSERVE_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", str(checkpoint), *FLAGS, "--require-api-key"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=environ if variable is None else {**environ, "VTSERVE_API_KEY": variable},
    )
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("Error: --require-api-key: ")
    assert "VTSERVE_API_KEY" in line
    assert "--api-key " in line
    assert "--api-key-file" in line


def test_a_key_that_is_required_and_given_is_asked_for(start: Start) -> None:
    server = start("--require-api-key", "--api-key", "secret")
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200


def test_a_checkpoint_that_is_damaged_ends_it_at_once(checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in checkpoint.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", str(model), *FLAGS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_it_serves_on_when_nobody_reads_what_it_says(start: Start) -> None:
    server = start("--alloc-trace", "--alloc-trace-min-mib", "0", ready=False)
    assert server.process.stderr is not None
    server.process.stderr.close()
    server.process.stderr = None
    server.wait_ready()
    [engine] = server.engines()
    os.kill(engine, signal.SIGKILL)
    while server.engines() == [engine] or httpx.get(f"{server.url}/health").status_code != 200:
        time.sleep(0.05)
    assert server.client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0


def test_connections_beyond_the_limit_wait(start: Start) -> None:
    server = start(ready=False, limit=64)
    server.wait_ready()
    port = int(server.url.rpartition(":")[2])
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    time.sleep(0.5)
    for connection in connections:
        connection.close()
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    status, said = server.end()
    assert status == 0
    assert "no connection can be accepted: Too many open files (ulimit -n)" in said


def test_keys_and_prompts(start: Start, tmp_path: Path) -> None:
    server = start("--api-key", "secret", "--record-prompts")
    with pytest.raises(openai.AuthenticationError):
        server.client.completions.create(model="tiny", prompt="hello", max_tokens=2)
    client = server.client.with_options(api_key="secret")
    with pytest.raises(openai.APIStatusError) as failed:
        client.completions.create(model="tiny", prompt=[faulty_engine.TOO_LARGE, 7], max_tokens=2)
    assert failed.value.status_code == 503
    [file] = (tmp_path / "failures").glob("*.json")
    record = json.loads(file.read_text())
    assert record["requests"][0]["prompt_token_ids"] == [faulty_engine.TOO_LARGE, 7]
    assert httpx.get(f"{server.url}/debug/alloc/failures").status_code == 401
    assert len(client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices) == 1
