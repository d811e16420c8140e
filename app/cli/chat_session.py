"""The turns of ``vtserve chat``: said in a terminal or through a pipe, with answers shown as they come."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from app.cli.plain_text import printable_lines
from app.conversation import Conversation
from app.open_ai import ServerError

__all__ = ["as_unicode", "recite", "talk"]

COMMANDS = "/reset begins anew, /quit (or Ctrl-D) ends, Ctrl-C ends an answer"
PROMPT = "> "


def talk(conversation: Conversation, title: str) -> bool:
    """Answer what is typed in a terminal, until its end. Returns False if it gave errors and no answer."""
    import readline  # noqa: F401  # gives `input` editing and a history

    click.echo(f"{title}; {COMMANDS}", err=True)
    failed = False
    for said in _turns(conversation, _typed_lines()):
        answer = conversation.say(said)
        try:
            _show(answer)
        except KeyboardInterrupt:
            answer.close()
            conversation.keep_half()
            click.echo()
        except ServerError as error:
            failed = True
            click.echo(f"Error: {error}", err=True)
    return conversation.answered or not failed


def recite(conversation: Conversation) -> None:
    """Answer what a file or program says, a line a turn, until its end.

    Raises
    ------
    ServerError
        An answer failed.
    """
    for said in _turns(conversation, _piped_lines()):
        _show(conversation.say(said))


def _turns(conversation: Conversation, lines: Iterator[str]) -> Iterator[str]:
    """What is said to the model: `lines` without commands, which are followed, and blank ones."""
    for line in lines:
        said = line.strip()
        if said in ("/quit", "/exit"):
            return
        if said == "/reset":
            conversation.reset()
        elif said.startswith("/") and sys.stdin.isatty() and said.removeprefix("/").isalpha():
            click.echo(f"{said}: no such command; {COMMANDS}", err=True)
        elif said:
            yield line


def _show(answer: Iterator[str]) -> None:
    """Write an answer as it comes, and end its line, also where it breaks off."""
    steered = sys.stdout.isatty()
    begun = False
    try:
        for piece in answer:
            click.echo(printable_lines(piece) if steered else piece, nl=False)
            begun = True
    except ServerError:
        if begun:
            click.echo()
        raise
    click.echo()


def _typed_lines() -> Iterator[str]:
    """Lines of a terminal, until Ctrl-D. Ctrl-C throws away what was typed."""
    prompted = sys.stdout.isatty()
    while True:
        try:
            if not prompted:
                click.echo(PROMPT, nl=False, err=True)
            yield as_unicode(input(PROMPT if prompted else ""))
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo(f"\n{COMMANDS}", err=True)


def _piped_lines() -> Iterator[str]:
    """Lines of standard input, which is UTF-8 whatever the locale says."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise click.UsageError(f"standard input: line {number} is not UTF-8.") from None


def as_unicode(text: str) -> str:
    """`text` of a terminal or an argument, whose bytes may be no UTF-8 (surrogate escapes, PEP 383)."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
