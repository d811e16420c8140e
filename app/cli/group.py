"""The outermost command: finds subcommands when needed, and ends every failure in a line and a status.

======  ========================================================================
status  meaning
======  ========================================================================
0       done
1       anything that failed; one line on stderr, the traceback with ``--debug``
2       usage: a flag or variable has a value that cannot be used
3       ``vtserve plan``: it does not fit
130     interrupted (Ctrl-C)
141     whoever read standard output closed it
======  ========================================================================
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import click

from engine.errors import ConfigurationError, VtserveError

_DEBUG = "vtserve.debug"
_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
INTERRUPTED = 130
READER_GONE = 141


class LazyCommand(NamedTuple):
    """A subcommand that is imported when it is called, so that ``vtserve --help`` imports no numerics."""

    target: str
    """``module:attribute`` of the click command"""
    summary: str
    """its line in the group's help"""


class CommandGroup(click.Group):
    """A click group over `LazyCommand` entries that ends every failure as the module's table says."""

    def __init__(self, *args: Any, lazy_commands: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy_commands = dict(lazy_commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        entry = self.lazy_commands.get(name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        # A group of verbs leaves it to them: what is said last is what counts.
        if not isinstance(command, CommandGroup) and not any(p.name == "debug" for p in command.params):
            command.params.append(debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=self.lazy_commands, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.lazy_commands.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            replace_closed_streams()
            return super().main(*args, **kwargs)
        except KeyboardInterrupt:  # while click does not look: completing a word, or on the way out
            sys.exit(INTERRUPTED)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except click.UsageError as error:
            raise in_one_line(error) from None
        except BrokenPipeError:
            discard_output()
            raise click.exceptions.Exit(READER_GONE) from None
        except OSError as error:  # a help text or the version has no place
            fail(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            use_utf8()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except click.UsageError as error:
            raise in_one_line(error) from None
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort):
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            discard_output()
            ctx.exit(READER_GONE)
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            fail(error)


class Failure(click.ClickException):
    """One line for stderr and the status to exit with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]  # click declares it on the class and reads it here


def debug_option() -> click.Option:
    """``--debug``, which every subcommand has."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[_DEBUG] = value
        logging.basicConfig(
            level=logging.INFO if value else logging.WARNING, format="%(levelname)s: %(message)s"
        )

    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show tracebacks and what the engine decides.",
    )


def replace_closed_streams() -> None:
    """Open what was closed before the start (``>&-``), or the next file opened would get what is printed.

    Input ends at once, messages are lost; standard output fails as a full disk does, so that nobody takes
    what was written nowhere for done.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            descriptor = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def discard_output() -> None:
    """Send what is still buffered nowhere: without this the interpreter would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def use_utf8() -> None:
    """Write UTF-8 whatever the locale says: a model's text does not fit Latin-1, and JSON is UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")


def in_one_line(error: click.UsageError) -> click.ClickException:
    """What to raise instead of `error`, which click shows in four lines. A help text stays as it is."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    return Failure(" ".join(error.format_message().split()), error.exit_code)


def fail(error: Exception) -> NoReturn:
    """Raise the click error whose line and status describe `error`."""
    if isinstance(error, VtserveError):
        message = str(error)
    elif isinstance(error, OSError) and error.strerror:
        named = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if not named and error.errno in _NOT_WRITTEN:  # whoever writes a file names it
            named = ["standard output"]
            discard_output()
        message = ": ".join([*named, error.strerror])
    elif isinstance(error, MemoryError) or "failed to map segment" in str(error):
        said = f" ({error})" if str(error) else ""
        message = f"the host has no memory left for this process{said}: `ulimit -v`, a container's limit"
    else:
        message = f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)"
    status = 2 if isinstance(error, ConfigurationError) else 1
    raise Failure(" ".join(message.split()), status) from error
