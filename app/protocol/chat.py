"""``POST /v1/chat/completions``: request and response."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from app.http_errors import ApiError
from app.protocol.fields import Int64, RequestModel, TextRequest
from app.protocol.usage import Usage

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "ChatTokenLogprob",
    "ConversationFields",
    "conversation",
]


class ContentPart(RequestModel):
    """A part of a message. Only text is served."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(RequestModel):
    """One turn. What else it holds is the chat template's."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None


class ConversationFields(RequestModel):
    """What a chat template is given."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = Field(False, description="Not served.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")


class ChatRequest(TextRequest, ConversationFields):
    """A conversation to answer."""

    max_tokens: Int64 | None = Field(None, description="The older name of `max_completion_tokens`.")
    max_completion_tokens: Int64 | None = Field(
        None, description="Left out: as many as fit in the model's length."
    )
    logprobs: bool | None = False
    top_logprobs: Int64 | None = Field(None, description="Of this many likeliest tokens, with `logprobs`.")
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"} is served.')
    tools: list[dict[str, Any]] | None = Field(None, description="Not served.")
    tool_choice: str | dict[str, Any] | None = Field(None, description='Only "none" and "auto".')
    parallel_tool_calls: bool | None = Field(None, description="Accepted; changes nothing.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    service_tier: str | None = Field(None, description="Accepted; changes nothing.")
    reasoning_effort: str | None = Field(None, description="Accepted; changes nothing.")

    RENAMED: ClassVar[dict[str, str]] = {"logprobs": "top_logprobs", "prompt": "messages"}

    def check(self) -> None:
        """Refuse what is not served. Raises ApiError."""
        self.check_stream_options()
        if self.tools:
            raise ApiError(400, "tools: tool calls are not served", param="tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: tool calls are not served", param="tool_choice")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise ApiError(
                400, 'response_format: expected {"type": "text"}, the one served', param="response_format"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, 'top_logprobs: expected with "logprobs": true', param="top_logprobs")
        if (self.n or 1) > 1024:
            raise ApiError(400, "n: expected at most 1024", param="n")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def conversation(fields: ConversationFields) -> list[dict[str, Any]]:
    """The messages as a chat template takes them: contents as text.

    Raises
    ------
    ApiError
        400: a part of a message is no text.
    """
    if fields.continue_final_message:
        raise ApiError(400, "continue_final_message: is not served", param="continue_final_message")
    messages = []
    for number, message in enumerate(fields.messages):
        plain = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            texts = []
            for place, part in enumerate(message.content):
                field = f"messages[{number}].content[{place}]"
                if part.type != "text" or part.text is None:
                    raise ApiError(400, f"{field}: expected text; nothing else is served", param=field)
                texts.append(part.text)
            plain["content"] = "\n".join(texts)
        messages.append(plain)
    return messages


class TopLogprob(TypedDict):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log probabilities of the content's tokens."""

    content: list[ChatTokenLogprob]


class AssistantMessage(TypedDict):
    """An answer."""

    role: Literal["assistant"]
    content: str


class DeltaMessage(TypedDict):
    """A piece of an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    """A piece of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """A response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """A chunk of a streamed response."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
