"""What can be told of the container without a container engine: its files agree with the program.

Compose's file is read as text, for no parser of YAML is a declared dependency.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from app.cli.serve import serve

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
GUIDE = (ROOT / "docs" / "DOCKER.md").read_text()

KNOWN_FLAGS = {spelling for param in serve.params for spelling in (*param.opts, *param.secondary_opts)}


def service(name: str) -> str:
    """The lines of one service of compose.yaml."""
    found = re.search(rf"^  {name}:\n((?:    .*\n|\n)+)", COMPOSE, re.MULTILINE)
    assert found is not None, f"no service {name}"
    return found.group(1)


def command_of(text: str) -> list[str]:
    """``command: [...]`` of a service, which has to be a list on one line for this."""
    found = re.search(r"^    command: (\[.*\])$", text, re.MULTILINE)
    assert found is not None, "no command"
    command: list[str] = json.loads(found.group(1))
    return command


def flags_of(command: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in command if word.startswith("--")]


def test_no_variable_is_required_of_whoever_runs_another_service() -> None:
    """Compose fills in the whole file, whichever service is asked for; so does ``docker compose down``."""
    assert "${" in COMPOSE
    assert re.findall(r"\$\{\w+:?\?", COMPOSE) == []


def test_compose_gives_flags_that_serve_has() -> None:
    commands = re.findall(r"^ *command:", COMPOSE, re.MULTILINE)
    command = command_of(service("vtserve-gpu"))
    assert len(commands) == 1, "a command that is not looked at here"
    assert command[0] == "serve"
    assert flags_of(command)
    assert set(flags_of(command)) <= KNOWN_FLAGS


def test_the_gpu_service_asks_for_a_key() -> None:
    text = service("vtserve-gpu")
    assert "--require-api-key" in command_of(text)
    assert "VTSERVE_API_KEY: ${VTSERVE_API_KEY:-}" in text


@pytest.mark.parametrize("name", ["vtserve", "vtserve-gpu"])
def test_a_server_that_cannot_start_is_not_started_for_ever(name: str) -> None:
    """Without a key, or with a model that does not fit, the next start ends like the last."""
    assert re.search(r"^    restart: on-failure:\d+$", service(name), re.MULTILINE)


def test_the_guide_publishes_a_port_to_the_network_with_a_key_only() -> None:
    """``-p 8000:8000`` is every address of the host, past its firewall's usual rules."""
    commands = re.findall(r"^    (docker run (?:.*\\\n)*.*)$", GUIDE, re.MULTILINE)
    published = [command for command in commands if re.search(r"-p \d+:\d+", command)]
    assert published
    for command in published:
        assert "VTSERVE_API_KEY=" in command
        assert "--require-api-key" in command
    for command in commands:
        words = command.replace("\\\n", " ").split()
        if "serve" in words:
            assert set(flags_of(words[words.index("serve") :])) <= KNOWN_FLAGS


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves `path` out of what is sent: the last pattern that matches decides."""
    parts = path.split("/")
    parents = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, parent) for parent in parents):
            out = not line.startswith("!")
    return out


def test_what_the_image_copies_is_sent_to_the_build() -> None:
    copies = re.findall(r"^COPY ((?!--from)(?:\S+ )+)\S+$", DOCKERFILE, re.MULTILINE)
    sources = [ROOT / source for copy in copies for source in copy.split()]
    assert {ROOT / "app", ROOT / "engine", ROOT / "pyproject.toml"} <= set(sources)
    for source in sources:
        files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        assert files, f"{source} is not there"
        for file in files:
            if "__pycache__" not in file.parts:
                assert not ignored(file.relative_to(ROOT).as_posix()), file
    assert ignored("tests/test_docker.py")
    assert ignored(".git/config")
    assert ignored("app/__pycache__/cli.cpython-312.pyc")


def test_the_user_is_a_number_and_the_same_everywhere() -> None:
    """Kubernetes' ``runAsNonRoot`` believes numbers only, and volumes are owned by numbers."""
    [(user, group)] = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert len(re.findall(r"^USER", DOCKERFILE, re.MULTILINE)) == 1
    assert f"groupadd --gid {group} " in DOCKERFILE
    assert f"useradd --uid {user} --gid {group} " in DOCKERFILE
    assert f"--owner={user} --group={group} /cache" in DOCKERFILE
    assert f"{user}:{group}" in GUIDE


def test_build_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    comment = re.search(r"((?:^#.*\n)+)ARG EXTRAS=$", DOCKERFILE, re.MULTILINE)
    assert comment is not None
    named = set(re.findall(r'"(\w+)":', comment.group(1)))
    assert named == set(extras) - {"test", "browser", "dev"}
    for given in re.findall(r"EXTRAS[=:] ?([\w,]+)", DOCKERFILE + COMPOSE + GUIDE):
        assert set(given.split(",")) <= named
