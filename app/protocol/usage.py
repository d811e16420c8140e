"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from engine.outputs import RequestOutput

__all__ = ["PromptTokensDetails", "Usage", "usage_of"]


class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request, all its prompts and completions together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(outputs: Sequence[RequestOutput], *, count_output: bool = True) -> Usage:
    """Usage so far. `count_output` False: what was generated was thrown away."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs) if count_output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
