"""Tokens to text as they come, in whole characters, at the same cost for a token at any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

__all__ = ["ByteFallbackStream", "TextStream", "WindowStream"]

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"
_PAST = 8
"""tokens of the past that are decoded again: what a decoder does to its first token then falls on one of
these, and 8 bytes are enough to find the boundaries of UTF-8's characters (see `WindowStream`)"""


class TextStream:
    """Text of the tokens that follow a prompt, in whole characters; those that have none are passed over.

    Parameters
    ----------
    decode
        Text of token ids.
    has_text
        Whether a token is part of the text: it is known, and no special token that is skipped.
    byte_values
        The byte that a token id stands for, by a decoder that falls back to bytes; else empty.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int],
        *,
        has_text: Callable[[int], bool],
        byte_values: Mapping[int, int],
    ) -> None:
        self._has_text = has_text
        past = list(islice(filter(has_text, reversed(prompt_ids)), _PAST))[::-1]
        self._stream = (
            ByteFallbackStream(decode, past, byte_values) if byte_values else WindowStream(decode, past)
        )

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, ``""`` while a character is unfinished."""
        return self._stream.push(token_id) if self._has_text(token_id) else ""

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character."""
        return self._stream.finish()


class WindowStream:
    """Text of tokens whose bytes are UTF-8 (byte-level BPE), or that are text themselves.

    An unfinished character at the end decodes to exactly one U+FFFD (Unicode 16, section 3.9: one for each
    maximal subpart), and what comes later changes nothing before it. So all but a last U+FFFD is given out
    at once, and at most one character is held back, even while invalid bytes keep coming.

    Only the last tokens are decoded. Where these begin within a character, its rest decodes to other text
    than it is; but after three bytes at most, reading is in step again: a byte that begins a character does
    so in any context, and of bytes that continue one, no more than three do.

    Parameters
    ----------
    decode
        Text of token ids, each of which stands for at least one byte.
    prompt_ids
        What comes before. A character that it leaves unfinished is part of the stream's text.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-_PAST:])
        before = decode(self._ids)
        self._given = len(before.removesuffix(_UNFINISHED))
        self._prompt_is_open = before.endswith(_UNFINISHED)
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, ``""`` while a character is unfinished."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        settled = len(text.removesuffix(_UNFINISHED))
        if self._prompt_is_open and settled > self._given:
            # The prompt's own U+FFFD, if it turns out to be one.
            self._given += text[self._given] == _UNFINISHED
            self._prompt_is_open = False
        piece = text[self._given : settled]
        self._held = text[settled:]
        self._given = max(self._given, settled)
        if len(self._ids) >= 2 * _PAST:
            del self._ids[:-_PAST]
            self._given += len(self._decode(self._ids)) - len(text)
        return piece

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character."""
        held, self._held = self._held, ""
        return held


class ByteFallbackStream:
    """Text of tokens that are text themselves, but for some that stand for one byte each (SentencePiece).

    A run of such bytes that is not UTF-8 as a whole decodes to one U+FFFD for each byte. A stream cannot
    wait for the end of a run. It gives out characters as they are complete, and one U+FFFD for each byte
    that is no part of any.

    Parameters
    ----------
    decode
        Text of token ids.
    prompt_ids
        What comes before. Bytes at its end may begin a character that the stream completes.
    byte_values
        The byte that a token id stands for.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], byte_values: Mapping[int, int]) -> None:
        self._decode = decode
        self._byte_values = byte_values
        self._ids = list(prompt_ids[-_PAST:])
        self._has_begun = bool(self._ids)
        self._bytes = b""
        tail = len(self._ids)
        while tail and self._ids[tail - 1] in byte_values:
            tail -= 1
        self._of_prompt = 0
        for token_id in self._ids[tail:]:
            self._push_byte(byte_values[token_id])
        self._of_prompt = len(self._bytes)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, ``""`` while a character is unfinished."""
        byte = self._byte_values.get(token_id)
        if byte is not None:
            piece = self._push_byte(byte)
            if piece and not self._has_begun:
                # What a decoder does to the beginning of a text, it does to a character made of bytes too.
                self._has_begun = True
                if _UNFINISHED not in piece:
                    piece = self._decode([*self._ids, token_id])
        else:
            self._has_begun = True
            before = self._decode(self._ids)
            piece = self.finish() + self._decode([*self._ids, token_id])[len(before) :]
        self._ids.append(token_id)
        if len(self._ids) >= 2 * _PAST:
            del self._ids[:-_PAST]
        return piece

    def finish(self) -> str:
        """What is left: U+FFFD for each byte of an unfinished character."""
        return self._replace(len(self._bytes))

    def _push_byte(self, byte: int) -> str:
        self._bytes += bytes([byte])
        text = ""
        while self._bytes:
            try:
                text += self._bytes.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += self._replace(error.end)  # it starts at 0: no finished character is kept
            else:
                self._bytes, self._of_prompt = b"", 0
        return text

    def _replace(self, count: int) -> str:
        """U+FFFD for the first `count` bytes. The prompt's own are not part of the stream's text."""
        of_prompt = min(count, self._of_prompt)
        self._of_prompt -= of_prompt
        self._bytes = self._bytes[count:]
        return _UNFINISHED * (count - of_prompt)
