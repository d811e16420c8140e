"""``vtserve trace top`` of a file and of a server."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.trace.top import FileTop
from engine.memory.errors import OutOfMemoryError
from engine.memory.house import MemoryHouse
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope
from engine.memory.settings import TraceSettings

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "app.cli", "trace", "top"]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[MemoryHouse]:
    settings = TraceSettings(trace=True, file=tmp_path / "trace", records=64)
    house = MemoryHouse.build(HostMemoryResource(1 << 30), settings)
    yield house
    house.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_a_file_adds_up_and_goes_on(house: MemoryHouse, tmp_path: Path) -> None:
    top = FileTop(tmp_path / "trace")
    assert top.look().entries == {"not in the trace": 0, "free": 1 << 30}
    with memory_scope("weights/a"):
        weights = house.resource.allocate(64 << 20)
    with memory_scope("kv/b"):
        house.resource.allocate(16 << 20).close()
        cache = house.resource.allocate(32 << 20)
    with pytest.raises(OutOfMemoryError):
        house.resource.allocate(1 << 40)
    snapshot = top.look()
    assert snapshot.entries["weights"] == 64 << 20
    assert snapshot.entries["kv"] == 32 << 20
    assert sum(snapshot.entries.values()) == snapshot.total == 1 << 30
    assert snapshot.figures == {"requests for memory": "4", "failed": "1"}
    assert "FAILED #4" in snapshot.lines[-1]
    weights.close()
    assert "weights" not in top.look().entries
    cache.close()
    top.close()


def test_a_file_on_the_command_line(house: MemoryHouse, tmp_path: Path) -> None:
    with memory_scope("weights/a"):
        buffer = house.resource.allocate(64 << 20)
    done = run(str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"weights +64\.0 MiB +6\.2 %", done.stdout)
    assert "tag=weights/a" in done.stdout
    buffer.close()
    missing = run(str(tmp_path / "nothing"))
    assert missing.returncode == 1
    assert missing.stderr.startswith(f"Error: {tmp_path}/nothing: ")


def test_a_terminal_is_drawn_until_ctrl_c(house: MemoryHouse, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [*COMMAND, str(tmp_path / "trace"), "--interval", "0.05"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environ)
    os.close(theirs)
    drawn, told = b"", False
    end = time.monotonic() + 30
    while b"tag=kv/later" not in drawn:
        assert time.monotonic() < end, drawn[-500:]
        if select.select([ours], [], [], 0.5)[0]:
            drawn += os.read(ours, 1 << 16)
        if not told and b"free" in drawn:
            told = True
            with memory_scope("kv/later"):
                buffer = house.resource.allocate(1 << 20)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        if time.monotonic() > end:
            process.kill()
        if select.select([ours], [], [], 0.1)[0]:
            try:
                os.read(ours, 1 << 16)
            except OSError:
                break
    assert process.wait(10) == 0
    os.close(ours)
    buffer.close()


def test_a_server(checkpoint: Path, tmp_path: Path) -> None:
    flags = "--device cpu --threads 1 --kv-cache-memory 16MiB --max-model-len 512 --port 0 --alloc-trace"
    command = [sys.executable, "-m", "app.cli", "serve", str(checkpoint), *flags.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[2].rstrip(";")
        while httpx.get(f"{url}/health").status_code != 200:
            time.sleep(0.05)
        done = run(url, "--once")
        process.terminate()
        process.communicate()
    assert done.returncode == 0, done.stderr
    assert re.search(r"kv +16\.0 MiB", done.stdout)
    assert "running 0" in done.stdout
    assert "tag=kv/" in done.stdout
    gone = run(url, "--once")
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"Error: {url}: ")
