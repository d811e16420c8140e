"""The engine's process, spoken to directly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.memory.settings import TraceSettings
from engine.messages import AddRequest, Shutdown, StepOutputs
from engine.process import EXIT_FAILED, EXIT_ORPHANED, EXIT_REFUSED
from engine.sampling_params import SamplingParams
from engine.wire import (
    EngineReady,
    FailureReport,
    IntoEngine,
    LoadProgress,
    LoadRefused,
    MemoryReport,
    OutOfEngine,
    StartEngine,
    encode_frame,
    from_engine,
)
from tests import faulty_engine

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """An engine's process and our end of its socket."""

    def __init__(self, model: Path, failures: Path, **flags: object) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faulty_engine", str(theirs.fileno()), str(self.stacks.fileno())],
            pass_fds=[theirs.fileno(), self.stacks.fileno()],
            cwd=ROOT,
        )
        theirs.close()
        self._decoder = from_engine()
        self._waiting: list[OutOfEngine] = []
        config = EngineConfig.from_flags(
            **{
                "model": str(model),
                "device": "cpu",
                "threads": 1,
                "kv_cache_memory": 1 << 20,
                "max_model_len": 64,
                "failure_dir": str(failures),
                **flags,
            }
        )
        self.send(StartEngine(config, TraceSettings(stats=True), 30))

    def send(self, message: IntoEngine) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self) -> OutOfEngine | None:
        """The next message; None at the end."""
        while not self._waiting:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)

    def receive_until(self, kind: type) -> list[OutOfEngine]:
        received = []
        while (message := self.receive()) is not None:
            received.append(message)
            if isinstance(message, kind):
                return received
        raise AssertionError(f"it ended after {received}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.stacks.close()


@pytest.fixture
def model(shared_checkpoints: Path) -> Path:
    return shared_checkpoints / "qwen2" / "NVFP4-modelopt"


@pytest.fixture
def child(model: Path, tmp_path: Path) -> Iterator[Child]:
    child = Child(model, tmp_path)
    yield child
    child.close()


def request(token: int, max_tokens: int = 3) -> AddRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(request_id=f"r{token}", prompt_token_ids=[token, 1], params=params)


def test_it_tells_of_the_load_and_serves(child: Child) -> None:
    received = child.receive_until(EngineReady)
    kinds = [type(message) for message in received]
    assert kinds[0] is LoadProgress
    assert kinds[-2:] == [MemoryReport, EngineReady]
    ready = received[-1]
    assert isinstance(ready, EngineReady)
    assert ready.limits.max_model_len == 64
    assert "KV cache" in ready.summary
    child.send(request(5))
    tokens = []
    while len(tokens) < 3:
        message = child.receive_until(StepOutputs)[-1]
        assert isinstance(message, StepOutputs)
        tokens += [token for update in message.updates for token in update.new_token_ids]
    child.send(Shutdown())
    assert child.process.wait(30) == 0


def test_a_long_prompt_is_told_piece_by_piece(model: Path, tmp_path: Path) -> None:
    """Whoever watches for progress sees each step, though only the last has a token."""
    child = Child(model, tmp_path, max_num_batched_tokens=8, max_num_seqs=2)
    child.receive_until(EngineReady)
    params = SamplingParams(temperature=0, max_tokens=1)
    child.send(AddRequest(request_id="a", prompt_token_ids=[5] * 40, params=params))
    steps = []
    while not steps or not steps[-1].updates:
        message = child.receive_until(StepOutputs)[-1]
        assert isinstance(message, StepOutputs)
        steps.append(message)
    assert [step.stats.prefill_tokens for step in steps] == [8] * 5
    child.close()


def test_it_ends_with_whoever_started_it(child: Child) -> None:
    child.receive_until(EngineReady)
    child.socket.shutdown(socket.SHUT_RDWR)
    assert child.process.wait(30) == EXIT_ORPHANED


def test_it_ends_in_the_load_too(child: Child) -> None:
    child.socket.close()
    assert child.process.wait(30) == EXIT_ORPHANED


def test_signals_of_a_terminal_are_not_for_it(child: Child) -> None:
    child.receive_until(EngineReady)
    child.process.send_signal(signal.SIGINT)
    child.process.send_signal(signal.SIGTERM)
    child.send(request(5))
    child.receive_until(StepOutputs)
    assert child.process.poll() is None


def test_it_shows_its_stacks_while_it_hangs(child: Child) -> None:
    child.receive_until(EngineReady)
    child.send(request(faulty_engine.HANGS))
    for _ in range(200):
        child.process.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
        text = os.pread(child.stacks.fileno(), 1 << 20, 0).decode()
        if "do_harm" in text:
            break
    assert "do_harm" in text
    assert "in _receive" in text, "all threads are shown"


def test_it_hands_its_records_on(child: Child, tmp_path: Path) -> None:
    child.receive_until(EngineReady)
    child.send(request(faulty_engine.THROWS))
    report = child.receive_until(FailureReport)[-1]
    assert isinstance(report, FailureReport)
    assert [item.request_id for item in report.record.requests] == [f"r{faulty_engine.THROWS}"]
    assert (tmp_path / f"{report.record.id}.json").exists()
    assert child.process.wait(30) == EXIT_FAILED


def test_what_it_refuses_is_one_line(model: Path, tmp_path: Path) -> None:
    child = Child(model, tmp_path, max_model_len=10**6)
    refused = child.receive_until(LoadRefused)[-1]
    assert isinstance(refused, LoadRefused)
    assert refused.is_usage
    assert refused.text.startswith("--max-model-len")
    assert child.process.wait(30) == EXIT_REFUSED
    child.close()
    child = Child(tmp_path, tmp_path)
    refused = child.receive_until(LoadRefused)[-1]
    assert isinstance(refused, LoadRefused)
    assert not refused.is_usage
    assert "config.json" in refused.text
    child.close()
    assert list(tmp_path.iterdir()) == []
