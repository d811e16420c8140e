"""Prompts from the command line, a file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

STANDARD_INPUT = "-"


def gather_prompts(given: Sequence[str], file: str | None, *, flag: str = "--prompt-file") -> list[str]:
    """The prompts of ``--prompt`` and then those of a file, one a line; blank lines are none.

    `flag` is what gives the file.

    Raises
    ------
    click.BadParameter
        The text is not UTF-8, or the file cannot be read or holds no prompt.
    """
    texts = [_as_text(prompt, number) for number, prompt in enumerate(given, start=1)]
    return [*texts, *(_read_lines(file, flag) if file else [])]


def _read_lines(file: str, flag: str) -> list[str]:
    name = "standard input" if file == STANDARD_INPUT else file
    hint = f"'{flag}'"
    try:
        if file == STANDARD_INPUT:
            data = sys.stdin.buffer.read()
        else:
            with open(file, "rb") as stream:
                data = stream.read()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise click.BadParameter(f"{name}: {error.strerror}.", param_hint=hint) from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise click.BadParameter(f"{name}: line {line} is not UTF-8.", param_hint=hint) from error
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise click.BadParameter(f"{name} holds no prompt; write one a line.", param_hint=hint)
    return prompts


def _as_text(prompt: str, number: int) -> str:
    """The argument read as UTF-8, also where the locale could not decode it (surrogate escapes, PEP 383)."""
    try:
        return prompt.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise click.BadParameter(f"number {number} is not UTF-8.", param_hint="'--prompt'") from None
