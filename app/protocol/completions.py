"""``POST /v1/completions``: request and response."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.http_errors import ApiError
from app.protocol.fields import Int64, TextRequest
from app.protocol.usage import Usage

__all__ = ["Completion", "CompletionChoice", "CompletionLogprobs", "CompletionRequest", "Prompts"]

Prompts = str | list[int] | list[str] | list[list[int]]
MAX_PROMPTS = 1024


def _check_prompts(value: Any) -> Any:
    """Tells in one line what a union of lists would tell in a line for each member."""
    if isinstance(value, str) or _all(value, str) or _all(value, int):
        return value
    if isinstance(value, list) and value and all(_all(item, int) for item in value):
        return value
    raise PydanticCustomError("prompt", "expected text, a list of token ids, or a list of either")


def _all(value: Any, kind: type) -> bool:
    # A bool is an int to isinstance, and no token id.
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


class CompletionRequest(TextRequest):
    """Text to go on from."""

    prompt: Annotated[Prompts, PlainValidator(_check_prompts, json_schema_input_type=Prompts)]
    max_tokens: Int64 | None = Field(16, description="0 only with `echo`: nothing but the prompt.")
    logprobs: Int64 | None = Field(None, description="Of this many likeliest tokens, too.")
    best_of: Int64 | None = Field(None, description="Expected to equal `n`.")
    suffix: str | None = Field(None, description="Not served.")

    RENAMED: ClassVar[dict[str, str]] = {}

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several: text, or token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def check(self) -> None:
        """Refuse what no model here does. Raises ApiError."""
        self.check_stream_options()
        if self.suffix:
            raise ApiError(400, "suffix: text before a suffix is not served", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, f"best_of: {self.best_of}: expected `n`, {self.n or 1}", param="best_of")
        if len(self.prompts) * (self.n or 1) > MAX_PROMPTS:
            raise ApiError(400, f"n: expected at most {MAX_PROMPTS} completions in all", param="n")


class CompletionLogprobs(TypedDict):
    """Log probabilities, a list entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """A response, or a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
