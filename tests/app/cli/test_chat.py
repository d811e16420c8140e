"""``vtserve chat`` against a real server, and ones that misbehave; in a terminal, and through a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from app.conversation import Conversation
from app.open_ai import ServerError
from tests.app.hostile_server import chunk, events, hostile_server, response

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "app.cli", "chat"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "VTSERVE_API_KEY"}
HELLO = events(chunk("Hello"), chunk(" there"), chunk(None, finish="stop"), "[DONE]")


def run(
    *flags: str, said: bytes | str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *flags],
        input=said.encode() if isinstance(said, str) else said,
        capture_output=True,
        cwd=ROOT,
        timeout=120,
        env={**ENVIRONMENT, **(environ or {})},
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.app.local_server", str(checkpoint), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_lines_are_turns(url: str) -> None:
    flags = ["--url", url, "--max-tokens", "3", "--temperature", "0"]
    once = run(*flags, said="hello\n")
    assert once.returncode == 0, once.stderr
    assert once.stderr == ""
    # After /reset nothing was said before.
    more = run(*flags, said="hello\nhello\n/reset\n\nhello")
    assert more.returncode == 0
    assert more.stdout.startswith(once.stdout)
    assert more.stdout.endswith(once.stdout)
    assert run(*flags, said="/quit\nhello\n").stdout == ""


def test_a_conversation_is_what_was_said(url: str) -> None:
    with Conversation(url, "tiny", system="Be brief.", max_tokens=4, temperature=0) as conversation:
        answer = "".join(conversation.say("hello"))
        assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
        assert conversation.messages[-1]["content"] == answer
        pieces = conversation.say("and?")
        first = next(pieces)
        pieces.close()
        conversation.keep_half()
        assert conversation.messages[-1] == {"role": "assistant", "content": first}
        conversation.reset()
        assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_what_is_sent_turn_by_turn() -> None:
    with hostile_server(HELLO) as server:
        flags = ["--model", "x", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0.5"]
        done = run("--url", f"{server.url}/v1/", *flags, said="\ufeffone\r\n\ntwo\n/reset\n/etc/passwd?\n")
        assert done.stdout == "Hello there\n" * 3
        assert {path for path, _ in server.requests} == {"/v1/chat/completions"}
        bodies = [json.loads(body) for _, body in server.requests]
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "one"}]
    answer = {"role": "assistant", "content": "Hello there"}
    assert [body.pop("messages") for body in bodies] == [
        first,
        [*first, answer, {"role": "user", "content": "two"}],
        [system, {"role": "user", "content": "/etc/passwd?"}],
    ]
    assert bodies[0] == {"model": "x", "stream": True, "max_completion_tokens": 9, "temperature": 0.5}


@pytest.mark.parametrize("text", ["a\u2028b\u0085c\x0bd", "é 🙂 \ufeff", 'quote " and \\', "two\nlines"])
def test_any_text_comes_through_the_pipe(text: str) -> None:
    with hostile_server(events(chunk(text), chunk(None, finish="stop"))) as server:
        done = run("--url", server.url, said="hi\n", environ={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.stdout == text + "\n"
    assert done.returncode == 0


def test_an_answer_that_was_not_begun_was_not_asked_for() -> None:
    with hostile_server(b"", hang=60) as server, Conversation(server.url, "m", timeout=0.2) as conversation:
        answer = conversation.say("hello")
        with pytest.raises(ServerError, match=r"no byte for 0\.2 s"):
            next(answer)
        conversation.keep_half()
        assert conversation.messages == []
    with hostile_server(HELLO) as server, Conversation(server.url, "m") as conversation:
        conversation.say("hello").close()
        conversation.keep_half()
        assert conversation.messages == []


def test_no_server_is_one_line() -> None:
    done = run("--url", "http://127.0.0.1:9", said="hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: http://127.0.0.1:9: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        (["--url", "localhost:8000"], {}, "Error: --url localhost:8000: expected a URL"),
        (["--url", "http://a", "--api-key", "a b"], {}, "Error: --api-key: expected"),
        (["--url", "http://a"], {"VTSERVE_API_KEY": "schlüssel"}, "Error: VTSERVE_API_KEY: expected"),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], environ: dict[str, str], expected: str) -> None:
    done = run(*flags, said="hello\n", environ=environ)
    assert done.returncode == 2
    assert done.stderr.startswith(expected)
    assert len(done.stderr.splitlines()) == 1


def test_input_that_is_no_text_is_named() -> None:
    with hostile_server(HELLO) as server:
        done = run("--url", server.url, said=b"one\n\xff\xfe\n")
    assert done.returncode == 2
    assert done.stdout == "Hello there\n"
    assert "standard input: line 2 is not UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (response(b'{"error": {"message": "no key"}}', status="401 Unauthorized"), "401: no key"),
        (
            response(
                b'{"error": {"message": "it stopped", "failure_id": "f-1"}}', status="503 Service Unavailable"
            ),
            "503: it stopped; failure record: f-1",
        ),
        (response(b"<html>", status="502 Bad Gateway"), "502: <html>"),
        (response(b"x" * 10_000_000, status="500 Internal Server Error"), "500: xxx"),
        (events(chunk("half")), "the stream ended before the answer did"),
        (events(chunk("half"), length=10_000), "peer closed connection"),
        (events(chunk("half"), {"error": {"message": "it died; record: x"}}), "it died; record: x"),
        (events(chunk("half"), {"error": "it\x1b[2J\ndied"}), "it?[2J died"),
        (events({"choices": 5}), "not OpenAI's protocol"),
        (events(5), "not OpenAI's protocol"),
        (response(b"{}"), "no events (application/json)"),
        (b"what is this\r\n\r\n", "illegal status line"),
        (b"", "disconnected"),
    ],
)
def test_what_a_server_does_wrong_is_one_line(answer: bytes, expected: str) -> None:
    with hostile_server(answer) as server:
        done = run("--url", server.url, said="hello\nagain\n")
        assert done.returncode == 1
        assert len(server.requests) == 1, "a script ends with its first failure"
        [error] = done.stderr.splitlines()
        assert error.startswith(f"Error: {server.url}: ")
        assert expected in error
        assert done.stdout == ("half\n" if b"half" in answer else "")
        with Conversation(server.url, "m") as conversation:
            with pytest.raises(ServerError):
                list(conversation.say("hello"))
            assert conversation.messages == [], "it was not said"


def test_a_server_that_hangs_is_given_up() -> None:
    with hostile_server(events(chunk("half")), hang=60) as server:
        done = run("--url", server.url, "--timeout", "0.5", said="hello\n")
    assert done.returncode == 1
    assert done.stdout == "half\n"
    assert done.stderr == f"Error: {server.url}: no byte for 0.5 s\n"


class Terminal:
    """``vtserve chat`` in a terminal that a test types into and reads."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C, and again if nothing comes of it, up to `pattern`.

        A signal that arrives just before the interpreter waits for a key is noticed with the next one.
        """
        for _ in range(20):
            self._process.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                self.wait_for(pattern, seconds=3)
                return
        raise AssertionError(self._shown)

    def wait_for(self, pattern: str, *, seconds: float = 60) -> str:
        """What was shown up to `pattern` and since the last call."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self._shown)):
            assert time.monotonic() < end, self._shown
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self._shown += self._read()
        shown, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return shown

    def status(self) -> int:
        """How it ended."""
        return self._process.wait(60)

    def _read(self) -> str:
        return os.read(self._descriptor, 1 << 16).decode()


@contextmanager
def terminal(*flags: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environ = {**ENVIRONMENT, "TERM": "dumb"}
    with subprocess.Popen(
        [*COMMAND, *flags], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environ
    ) as process:
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


def test_ctrl_c_ends_the_answer_only() -> None:
    half = events(chunk("half"))
    with hostile_server(half, hang=60) as server, terminal("--url", server.url) as chat:
        chat.wait_for(r"m at http://.*Ctrl-C ends an answer\r\n> ")
        for turn in range(2):
            chat.type(f"turn {turn}\n")
            chat.wait_for("half")
            chat.interrupt_until("> ")
        chat.interrupt_until(r"/quit \(or Ctrl-D\) ends.*\n> ")
        chat.type("/quit\n")
        assert chat.status() == 0
        last = json.loads(server.requests[-1][1])["messages"]
    said = [message["content"] for message in last]
    assert said == ["turn 0", "half", "turn 1"], "what there was of an answer is remembered"


def test_a_conversation_in_a_terminal_outlives_failures() -> None:
    broken = response(b'{"error": {"message": "no"}}', status="503 Service Unavailable")
    steering = events(chunk("\x1b[2Jtab\tand\nline"), chunk(None, finish="stop"))
    with hostile_server(steering, first=[broken]) as server, terminal("--url", server.url) as chat:
        chat.wait_for("> ")
        chat.type("hello\n")
        assert chat.wait_for("> ").count("Error: ") == 1
        chat.type("/rest\n")
        assert "/rest: no such command; /reset begins anew" in chat.wait_for(r"\n> ")
        chat.type("hello\n")
        shown = chat.wait_for(r"line\r\n> ")
        assert "?[2Jtab\tand\r\nline" in shown, "a model does not steer the terminal"
        chat.type("\x04")
        assert chat.status() == 0
        assert len(json.loads(server.requests[-1][1])["messages"]) == 1


def test_a_conversation_in_a_terminal_without_an_answer_failed() -> None:
    with hostile_server(b"") as server, terminal("--url", server.url) as chat:
        chat.wait_for("> ")
        chat.type("hello\n")
        chat.wait_for(r"Error: .*\n> ")
        chat.type("/quit\n")
        assert chat.status() == 1
