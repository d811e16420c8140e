"""How failures end: a line and a status. And what is imported for a help text."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.cli.group import CommandGroup, LazyCommand
from app.cli.options import ByteSize, WholeNumber
from app.cli.trace.show import Kinds
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigurationError
from engine.sampling_params import MAX_N

ERRORS: dict[str, BaseException] = {
    "checkpoint": CheckpointError("model.safetensors: tensor lm_head.weight is missing"),
    "configuration": ConfigurationError("VT_CUDA_ALLOC_TRACE=maybe: expected 1 or 0"),
    "os": PermissionError(errno.EACCES, "Permission denied", "/root/prompts.txt"),
    "bug": KeyError("layers"),
    "memory": MemoryError(),
    "array": MemoryError("Unable to allocate 8.00 GiB for an array"),
    "library": ImportError("/lib/driver.so: failed to map segment from shared object"),
    "multiline": RuntimeError("first\nsecond"),
    "interrupt": KeyboardInterrupt(),
    "abort": click.Abort(),
}


@click.command()
@click.argument("name")
def throw(name: str) -> None:
    raise ERRORS[name]


def run(*args: str) -> Result:
    group = CommandGroup(name="vtserve", lazy_commands={"throw": LazyCommand(f"{__name__}:throw", "Throw.")})
    return CliRunner().invoke(group, ["throw", *args], prog_name="vtserve")


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("checkpoint", 1, "Error: model.safetensors: tensor lm_head.weight is missing"),
        ("configuration", 2, "Error: VT_CUDA_ALLOC_TRACE=maybe: expected 1 or 0"),
        ("os", 1, "Error: /root/prompts.txt: Permission denied"),
        ("bug", 1, "Error: internal error: KeyError: 'layers' (--debug shows the traceback)"),
        (
            "memory",
            1,
            "Error: the host has no memory left for this process: `ulimit -v`, a container's limit",
        ),
        (
            "array",
            1,
            "Error: the host has no memory left for this process (Unable to allocate 8.00 GiB for an array): "
            "`ulimit -v`, a container's limit",
        ),
        (
            "library",
            1,
            "Error: the host has no memory left for this process (/lib/driver.so: failed to map segment from "
            "shared object): `ulimit -v`, a container's limit",
        ),
        ("multiline", 1, "Error: internal error: RuntimeError: first second (--debug shows the traceback)"),
    ],
)
def test_failure_is_one_line(name: str, status: int, line: str) -> None:
    result = run(name)
    assert result.stderr == f"{line}\n"
    assert result.stdout == ""
    assert result.exit_code == status


def test_debug_shows_the_traceback_before_the_line() -> None:
    result = run("--debug", "checkpoint")
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith("\nError: model.safetensors: tensor lm_head.weight is missing\n")
    assert result.exit_code == 1


@pytest.mark.parametrize("name", ["interrupt", "abort"])
def test_interrupt_is_quiet(name: str) -> None:
    result = run(name)
    assert (result.output, result.exit_code) == ("", 130)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
wanted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("app.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("click", ["--version"]),
        ("click.types", ["--version"]),
        ("app.cli.group", ["--version"]),
        ("engine.memory.errors", ["--help"]),
        ("importlib.metadata", ["--version"]),
        ("app.cli.generate", ["generate", "--help"]),
        ("app.settings", ["generate", "--prompt", "a"]),
        ("msgspec", ["generate", "--prompt", "a"]),
        ("numpy", ["plan", "model"]),
        ("app.cli.trace", ["trace", "show", "file"]),
        ("app.cli.trace.show", ["trace", "show", "file"]),
    ],
)
def test_interrupt_of_an_import_is_quiet(module: str, arguments: list[str]) -> None:
    done = python("-c", INTERRUPTED_IMPORT, module, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupt_while_a_word_is_completed_is_quiet() -> None:
    words = {"_VTSERVE_COMPLETE": "bash_complete", "COMP_WORDS": "vtserve generate --", "COMP_CWORD": "2"}
    done = python("-c", INTERRUPTED_IMPORT, "app.cli.generate", env={**os.environ, **words})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@click.command()
def flood() -> None:
    while True:
        click.echo("a line")


FLOOD = """
from tests.app.cli.test_group import CommandGroup, LazyCommand
CommandGroup(name="g", lazy_commands={"flood": LazyCommand("tests.app.cli.test_group:flood", "")})(["flood"])
"""


def test_closed_reader_is_quiet() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@click.command()
def read_all() -> None:
    click.echo(repr(sys.stdin.buffer.read()))


@click.command()
def complain() -> None:
    click.echo("a word", err=True)


STREAMS = """
import sys
from tests.app.cli.test_group import main, CommandGroup, LazyCommand
names = {"flood": "flood", "read": "read_all", "complain": "complain"}
commands = {name: LazyCommand(f"tests.app.cli.test_group:{target}", "") for name, target in names.items()}
(main if "--version" in sys.argv else CommandGroup(name="g", lazy_commands=commands))(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("redirection", "argument", "status", "output", "error"),
    [
        (">/dev/full", "flood", 1, "", "Error: standard output: No space left on device\n"),
        (">/dev/full", "--help", 1, "", "Error: standard output: No space left on device\n"),
        (">/dev/full", "--version", 1, "", "Error: standard output: No space left on device\n"),
        (">&-", "flood", 1, "", "Error: standard output: Bad file descriptor\n"),
        (">&-", "--help", 1, "", "Error: standard output: Bad file descriptor\n"),
        (">&-", "complain", 0, "", "a word\n"),
        ("2>&-", "complain", 0, "", ""),
        ("<&-", "read", 0, "b''\n", ""),
        ("<&- 2>&-", "read", 0, "b''\n", ""),
        ("<&- >&- 2>&-", "complain", 0, "", ""),
    ],
)
def test_streams_that_are_closed_or_full(
    redirection: str, argument: str, status: int, output: str, error: str
) -> None:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", STREAMS, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (output, error, status)


def python(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_help_imports_no_numerics() -> None:
    program = (
        "import sys; from app.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'numba', 'numpy', 'cuda', 'rich', 'tokenizers'} & sys.modules.keys()))"
    )
    result = python("-c", program)
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: ")
    assert result.stdout.endswith("\n[]\n")


def test_module_is_the_command() -> None:
    result = python("-m", "app.cli", "--version")
    assert result.returncode == 0
    assert result.stdout.startswith("vtserve, version ")


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["generate", "--promt", "x"], "--prompt"),
        (["generate", "--kv-cache-memroy", "1"], "--kv-cache-memory"),
        (["generat"], "generate"),
    ],
)
def test_misspelling_is_answered_with_the_right_spelling(arguments: list[str], suggestion: str) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="vtserve")
    assert result.exit_code == 2
    assert suggestion in result.stderr.splitlines()[-1]


def every_command(group: CommandGroup, *path: str) -> Iterator[tuple[list[str], click.Command]]:
    """Each command of `group` with its words, groups of verbs too."""
    yield [*path], group
    context = click.Context(group)
    for name in group.lazy_commands:
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, CommandGroup):
            yield from every_command(command, *path, name)
        else:
            yield [*path, name], command


def wrong_arguments() -> Iterator[list[str]]:
    """Arguments that a command cannot take: for each one, of each sort."""
    assert isinstance(main, CommandGroup)
    for path, command in every_command(main):
        context = click.Context(command)
        yield [*path, "--no-such-flag"]
        yield [*path, *["one"] * 9]
        required = [param for param in command.params if param.required]
        if required:
            yield path
        for param in command.get_params(context):
            if not isinstance(param, click.Option) or param.is_flag or not param.opts:
                continue
            flag = param.opts[0]
            yield [*path, flag]
            if isinstance(param.type, click.Choice | click.IntRange | click.FloatRange | ByteSize | Kinds):
                yield [*path, flag, "no\nsuch"]
            if isinstance(param.type, click.IntRange):
                yield [*path, flag, "-5"]


@pytest.mark.parametrize("arguments", [*wrong_arguments()], ids=repr)
def test_usage_error_is_one_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="vtserve")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.endswith("\n")
    assert len(result.stderr.splitlines()) == 1
    flag = next((word for word in arguments if word.startswith("--")), "")
    assert flag in result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("generate --n 0", "Invalid value for '--n' / '-n': '0': expected a whole number from 1 to 16384."),
        (f"generate --n {MAX_N + 1}", "'16385': expected a whole number from 1 to 16384."),
        ("generate --max-tokens 2.5", "'--max-tokens': '2.5': expected a whole number of at least 1."),
        ("serve --port 70000", "'--port': '70000': expected a whole number from 0 to 65535."),
        ("trace diff a b --top=-1", "'--top': '-1': expected a whole number of at least 0."),
        ("generate --top-p nan", "'--top-p': 'nan': expected a number over 0 and at most 1."),
        ("generate --min-p 2", "'--min-p': '2': expected a number from 0 to 1."),
        ("chat --temperature warm", "'--temperature': 'warm': expected a number of at least 0."),
        ("bench serve --timeout 0", "'--timeout': '0': expected a number over 0."),
        (f"plan --at-length {'9' * 5000}", "expected a whole number of at least 1."),
    ],
)
def test_wrong_number_is_answered_with_what_is_expected(arguments: str, line: str) -> None:
    result = CliRunner().invoke(main, arguments.split(), prog_name="vtserve")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"{line}\n")
    assert len(result.stderr) < 150


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generate", "--stop", ""], "'--stop': '': expected text that is not empty."),
        (["generate", "--stop", "\udcff"], r"'--stop': '\udcff' is not UTF-8."),
        (["generate", "--logprobs", "99"], "'--logprobs': '99': expected a whole number from 0 to 20."),
    ],
)
def test_what_generate_cannot_ask_for_names_its_own_flag(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(main, [*arguments, "--prompt", "a", "--model", "m"], prog_name="vtserve")
    assert (result.exit_code, result.stderr) == (2, f"Error: Invalid value for {line}\n")


def test_limits_of_flags_are_the_engines() -> None:
    command = main.get_command(click.Context(main), "generate")  # type: ignore[attr-defined]
    limits = {param.name: param.type.max for param in command.params if isinstance(param.type, WholeNumber)}
    assert limits["n"] == MAX_N
    assert limits["logprobs"] == EngineConfig(model="m").max_logprobs


def test_group_without_a_command_shows_its_help() -> None:
    result = CliRunner().invoke(main, ["trace"], prog_name="vtserve")
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: vtserve trace ")
    assert "summary" in result.stderr


def test_every_help_fits_a_screen_and_ends_with_an_example() -> None:
    runner = CliRunner()
    for arguments in [[], *([name] for name in main.lazy_commands)]:  # type: ignore[attr-defined]
        result = runner.invoke(main, [*arguments, "--help"], prog_name="vtserve", terminal_width=80)
        assert result.exit_code == 0, arguments
        lines = result.stdout.splitlines()
        assert len(lines) <= 24, arguments
        assert max(map(len, lines)) <= 80, arguments
        start = next(number for number, line in enumerate(lines) if line in ("  Example:", "  Examples:"))
        example = lines[start + 1 :]
        assert example, arguments
        assert all(line.startswith("    ") for line in example), arguments
