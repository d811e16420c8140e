"""Text to token ids and back, over the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from engine.errors import CheckpointError, RequestError
from engine.model.chat_template import ChatTemplate
from engine.model.files import read_optional_json, text_shown
from engine.model.text_stream import TextStream

__all__ = ["TextStream", "Tokenizer"]


class Tokenizer:
    """A model's tokenizer. Build it with `open`."""

    def __init__(self, inner: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        # What was set for training on batches is stored beside the vocabulary. A prompt is what it is.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._template = template
        self._special = {
            token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special
        }
        self._byte_values = _byte_values(inner)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat templates.

        Raises CheckpointError, which names the file.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a tokenizer: {text_shown(str(error))}") from None
        settings = read_optional_json(path / "tokenizer_config.json")
        special = _special_tokens(read_optional_json(path / "special_tokens_map.json"))
        special |= _special_tokens(settings)
        return cls(inner, ChatTemplate.read(path, settings, special))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises RequestError for half a surrogate pair, which UTF-8 cannot hold, and where the library fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: expected Unicode text, found half a surrogate pair at character {error.start}"
            ) from None
        try:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        except BaseException as error:
            # The library raises plain Exception; where Rust panics, pyo3's exception, which is none.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"prompt: the model's tokenizer cannot encode it: {text_shown(str(error))}"
            ) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an unknown id has none."""
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """Text of tokens that follow `prompt_ids`, as they come."""

        def has_text(token_id: int) -> bool:
            skipped = skip_special_tokens and token_id in self._special
            return not skipped and bool(self._inner.id_to_token(token_id))

        return TextStream(
            lambda ids: str(self._inner.decode(list(ids), skip_special_tokens=False)),
            prompt_ids,
            has_text=has_text,
            byte_values=self._byte_values,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation: `ChatTemplate.render`. Special tokens are part of it.

        Raises RequestError if there is no template, or it refuses.
        """
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            name=name,
            variables=variables,
        )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like: a string, or an object with its ``content``."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _byte_values(inner: tokenizers.Tokenizer) -> dict[int, int]:
    """The byte that a token id stands for, where the decoder falls back to bytes (SentencePiece)."""
    state = json.loads(inner.decoder.__getstate__()) if inner.decoder is not None else {}
    steps = state.get("decoders", [state])
    if not any(step.get("type") == "ByteFallback" for step in steps):
        return {}
    values = {}
    for byte in range(256):
        for token in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"):
            token_id = inner.token_to_id(token)
            if token_id is not None:
                values[token_id] = byte
    return values
