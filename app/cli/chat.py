"""``vtserve chat``: a conversation in the terminal with any server that speaks OpenAI's protocol."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from app.cli.group import Failure
from app.cli.options import Flag, HelpfulCommand, Number, flag_group

EPILOG = """\b
Example:
  vtserve chat --system "Answer in one sentence."
"""

CONVERSATION = "Conversation"
COMMANDS = "/reset begins anew, /quit (or Ctrl-D) ends, Ctrl-C ends an answer"

chat_flags = flag_group(
    "chat",
    [
        Flag(
            ["--url"],
            group=CONVERSATION,
            common=True,
            metavar="URL",
            default="http://127.0.0.1:8000",
            help="The server.",
        ),
        Flag(["--api-key"], group=CONVERSATION, common=True, metavar="KEY", help="Also VTSERVE_API_KEY."),
        Flag(
            ["--model"],
            group=CONVERSATION,
            common=True,
            metavar="NAME",
            default_text="the first",
            help="The model to talk to.",
        ),
        Flag(["--system"], group=CONVERSATION, common=True, metavar="TEXT", help="What comes first."),
        Flag(
            ["--max-tokens"],
            group=CONVERSATION,
            common=True,
            type=click.IntRange(min=1),
            metavar="N",
            default_text="what fits",
            help="Most tokens of an answer.",
        ),
        Flag(
            ["--temperature"],
            group=CONVERSATION,
            common=True,
            type=Number(min=0),
            metavar="T",
            default_text="the server's",
            help="Randomness of the choice.",
        ),
        Flag(
            ["--timeout"],
            group=CONVERSATION,
            type=Number(min=0, min_open=True),
            metavar="S",
            default=300.0,
            help="Seconds without a byte after which an answer has failed.",
        ),
    ],
)


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@chat_flags
def chat(chat: dict[str, Any]) -> None:
    """Talk to a model that is served. Lines of standard input are what you say."""
    from app.conversation import Conversation
    from app.open_ai import ServerError, first_model, split_keys

    url = chat["url"].rstrip("/").removesuffix("/v1")
    api_key = chat["api_key"] or split_keys(os.environ)
    conversation = Conversation(
        url,
        chat["model"] or first_model(url, api_key),
        api_key=api_key,
        system=chat["system"],
        max_tokens=chat["max_tokens"],
        temperature=chat["temperature"],
        timeout=chat["timeout"],
    )
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        import readline  # noqa: F401  # gives `input` editing and a history

        click.echo(f"{conversation.model} at {url}; {COMMANDS}", err=True)
    failed = None
    with conversation:
        while (said := _next_line(terminal)) is not None:
            if said.strip() in ("/quit", "/exit"):
                break
            if said.strip() == "/reset":
                conversation.reset()
                continue
            if not said.strip():
                continue
            try:
                for piece in conversation.say(said):
                    click.echo(piece, nl=False)
            except KeyboardInterrupt:
                conversation.keep_half()
                if not terminal:
                    raise
            except ServerError as error:
                if not terminal:
                    click.echo()
                    raise
                failed = error
                click.echo(f"\nError: {error}", err=True)
            click.echo()
    if failed is not None and not conversation.answered:
        raise Failure(str(failed), status=1)


def _next_line(terminal: bool) -> str | None:
    """What is said next; None at the end."""
    try:
        if terminal:
            return input("> ")
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8: {error.reason}.") from None
    return line.rstrip("\n") if line else None
