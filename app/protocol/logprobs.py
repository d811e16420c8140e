"""Log probabilities in the shapes of OpenAI's two APIs, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.protocol.chat import ChatLogprobs, ChatTokenLogprob
from app.protocol.completions import CompletionLogprobs
from engine.outputs import Logprob, PositionLogprob

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

_LEAST = -9999.0
"""stands for minus infinity, which JSON cannot say"""


def completion_logprobs(
    positions: Sequence[PositionLogprob | None], first: str, offset: int, *, as_ids: bool = False
) -> tuple[CompletionLogprobs, int]:
    """Entries for `positions`, and where the text after them begins.

    Parameters
    ----------
    positions
        None stands for a prompt's first token, which nothing is before.
    first
        Text of that token.
    offset
        Characters before the first position.
    as_ids
        Write tokens as ``token_id:N``.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        if position is None:
            tokens.append(first)
            token_logprobs.append(None)
            top_logprobs.append(None)
            offset += len(first)
            continue
        chosen = position.chosen
        tokens.append(_name(chosen, as_ids))
        token_logprobs.append(_finite(chosen.logprob))
        top_logprobs.append(
            {_name(entry, as_ids): _finite(entry.logprob) for entry in (*position.top, chosen)}
        )
        offset += len(chosen.token)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }, offset


def chat_logprobs(positions: Sequence[PositionLogprob], *, as_ids: bool = False) -> ChatLogprobs:
    """Entries for `positions`."""
    content: list[ChatTokenLogprob] = [
        {
            "token": _name(position.chosen, as_ids),
            "logprob": _finite(position.chosen.logprob),
            "bytes": list(position.chosen.token.encode()),
            "top_logprobs": [
                {
                    "token": _name(entry, as_ids),
                    "logprob": _finite(entry.logprob),
                    "bytes": list(entry.token.encode()),
                }
                for entry in position.top
            ],
        }
        for position in positions
    ]
    return {"content": content}


def prompt_logprobs(
    positions: Sequence[PositionLogprob | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: for each prompt token a dictionary from token ids."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(entry.token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.token,
            }
            for entry in (position.chosen, *position.top)
        }
        for position in positions
    ]


def _name(entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_ids else entry.token


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
