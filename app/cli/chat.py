"""``vtserve chat``: a conversation in the terminal with any server that speaks OpenAI's protocol."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from app.cli.options import Flag, HelpfulCommand, Number, WholeNumber, flag_group

EPILOG = """\b
Example:
  vtserve chat --system "Answer in one sentence."
"""

CONVERSATION = "Conversation"

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
            type=WholeNumber(min=1),
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
    """Talk to a model that is served.

    What is typed is what you say; where standard input is no terminal, each line of it. There the first
    failure ends it with status 1; in a terminal the conversation goes on.
    """
    from app.cli.chat_session import as_unicode, recite, talk
    from app.conversation import Conversation
    from app.open_ai import client_key, first_model, server_url

    url = server_url("--url", chat["url"])
    key = client_key(chat["api_key"], os.environ)
    system = chat["system"]
    conversation = Conversation(
        url,
        chat["model"] or first_model(url, key, chat["timeout"]),
        api_key=key,
        system=None if system is None else as_unicode(system),
        max_tokens=chat["max_tokens"],
        temperature=chat["temperature"],
        timeout=chat["timeout"],
    )
    with conversation:
        if not sys.stdin.isatty():
            recite(conversation)
        elif not talk(conversation, f"{conversation.model} at {url}"):
            click.get_current_context().exit(1)
