"""Rebuilds a byte-level BPE tokenizer from a GGUF file's metadata.

GGUF keeps tokens, their types and the merges, but only a *name* for the rule that splits text before BPE
(``tokenizer.ggml.pre``). The rules by name are llama.cpp's (``llm_tokenizer_bpe`` in src/llama-vocab.cpp).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError, UnsupportedModelError

__all__ = ["TokenizerFiles", "rebuild_tokenizer"]


class _TokenType(enum.IntEnum):
    """ggml's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_GPT2 = frozenset({"gpt-2", "phi-2"})
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS_AND_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_LETTERS_AND_REST}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_LETTERS_AND_REST}"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as the files of a Hugging Face checkpoint."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    """tokenizer_config.json"""
    chat_template: str | None

    def write(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""
        self.tokenizer.save(str(directory / "tokenizer.json"))
        text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def rebuild_tokenizer(fields: Mapping[str, Any], path: Path, context_length: int) -> TokenizerFiles:
    """The tokenizer that the metadata `fields` of the GGUF file at `path` describe.

    Raises
    ------
    CheckpointError
        Tokens or merges are missing or contradict each other.
    UnsupportedModelError
        Not byte-level BPE, or split by a rule that is not known here.
    """
    kind, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{path}: tokenizer {kind!r} is not served; expected byte-level BPE ('gpt2')"
        )
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    types = fields.get("tokenizer.ggml.token_type", [_TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise CheckpointError(f"{path}: tokenizer.ggml.merges holds an entry that is not two tokens")

    vocabulary = {token: index for index, token in enumerate(tokens)}
    llama3 = rule in _LLAMA3
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=llama3))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"{path}: tokens and merges contradict each other: {error}") from None
    tokenizer.pre_tokenizer = _pre_tokenizer(rule, path)
    if rule in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for special, wanted in ((True, _TokenType.CONTROL), (False, _TokenType.USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    for key, name in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            if not 0 <= int(index) < len(tokens):
                raise CheckpointError(
                    f"{path}: tokenizer.ggml.{name}_token_id is {index}, past the vocabulary"
                )
            config[key] = tokens[int(index)]
    if fields.get("tokenizer.ggml.add_bos_token", llama3) and "bos_token" in config:
        _prepend(tokenizer, config["bos_token"], vocabulary[config["bos_token"]])
        config["add_bos_token"] = True
    template = fields.get("tokenizer.chat_template")
    return TokenizerFiles(tokenizer, config, template if isinstance(template, str) else None)


def _pre_tokenizer(rule: str, path: Path) -> pre_tokenizers.PreTokenizer:
    if rule in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if rule in _LLAMA3 or rule in _QWEN2:
        pattern = Regex(_LLAMA3_SPLIT if rule in _LLAMA3 else _QWEN2_SPLIT)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    if rule in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    raise UnsupportedModelError(
        f"{path}: tokenizer.ggml.pre {rule!r} is not a rule for splitting text that is known"
    )


def _prepend(tokenizer: Tokenizer, token: str, index: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)]
    )
