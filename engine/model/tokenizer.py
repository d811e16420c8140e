"""Text to token ids and back, over the tokenizers library, and the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, RequestError
from engine.model.files import read_json

__all__ = ["TextStream", "Tokenizer"]

_UNFINISHED = "�"


class Tokenizer:
    """A model's tokenizer. Build it with `open`."""

    def __init__(self, inner: tokenizers.Tokenizer, template: str | None, special: Mapping[str, str]) -> None:
        self._inner = inner
        self._template = template
        self._special = special

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises CheckpointError."""
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
        settings_file = path / "tokenizer_config.json"
        settings = read_json(settings_file) if settings_file.is_file() else {}
        special = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
        return cls(inner, _template(path, settings), {k: v for k, v in special.items() if v is not None})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """Text of tokens that follow `prompt_ids`, as they come."""
        return TextStream(self, prompt_ids, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation. Raises RequestError if there is no template, or it refuses."""
        if self._template is None:
            raise RequestError("messages: the model has no chat template", field="messages")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"messages: the chat template refused: {error}", field="messages") from None


class TextStream:
    """Decodes a few last tokens at a time, so a token costs the same at any length, and never half a
    character.

    Two ends of the tokens are kept: text up to `_shown` has been given out, and decoding begins at `_first`,
    so that a decoder that treats its first token differently sees a token of the past there.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-8:])
        self._first = 0
        self._shown = len(self._ids)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, ``""`` while a character is unfinished."""
        self._ids.append(token_id)
        before, now = self._texts()
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._first, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What is left, unfinished characters as U+FFFD."""
        before, now = self._texts()
        self._first = self._shown = len(self._ids)
        return now[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        before = decode(self._ids[self._first : self._shown], skip_special_tokens=self._skip)
        return before, decode(self._ids[self._first :], skip_special_tokens=self._skip)


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own, else tokenizer_config.json's: one template, or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
