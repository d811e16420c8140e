"""``vtserve chat`` against a real server, and against ones that misbehave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.conversation import Conversation
from app.open_ai import ServerError
from tests.app.hostile_server import chunk, events, hostile_server, response

ROOT = Path(__file__).resolve().parents[3]


def run(*flags: str, said: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", "chat", *flags]
    return subprocess.run(command, input=said, capture_output=True, text=True, cwd=ROOT, timeout=120)


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
    # The second answer has the first turn before it; after /reset it has not.
    more = run(*flags, said="hello\nhello\n/reset\nhello\n")
    answers = more.stdout.splitlines()
    assert more.returncode == 0
    assert answers[0] == answers[-1] == once.stdout.splitlines()[0]
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


def test_no_server_is_one_line() -> None:
    done = run("--url", "http://127.0.0.1:9", said="hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: http://127.0.0.1:9: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (response(b'{"error": {"message": "no key"}}', status="401 Unauthorized"), "401: no key"),
        (response(b"<html>", status="502 Bad Gateway"), "502: <html>"),
        (events(chunk("half")), "the stream ended before the answer did"),
        (events(chunk("half"), length=10_000), "peer closed connection"),
        (events(chunk("half"), {"error": {"message": "it died; record: x"}}), "it died; record: x"),
        (events({"choices": 5}), "not OpenAI's protocol"),
        (events(5), "not OpenAI's protocol"),
        (b"what is this\r\n\r\n", ""),
    ],
)
def test_what_a_server_does_wrong_is_one_line(answer: bytes, expected: str) -> None:
    with hostile_server(answer) as url:
        done = run("--url", url, said="hello\n")
        assert done.returncode == 1
        errors = [line for line in done.stderr.splitlines() if line]
        assert len(errors) == 1
        assert errors[0].startswith(f"Error: {url}: ")
        assert expected in errors[0]
        with Conversation(url, "m") as conversation:
            with pytest.raises(ServerError):
                list(conversation.say("hello"))
            assert conversation.messages == [], "it was not said"


def test_a_server_that_hangs_is_given_up() -> None:
    with hostile_server(events(chunk("half")), hang=60) as url:
        done = run("--url", url, "--timeout", "0.5", said="hello\n")
    assert done.returncode == 1
    assert "no byte for 0.5 s" in done.stderr
