"""Models, tokens, versions and errors: the small requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.protocol.chat import ConversationFields
from app.protocol.fields import RequestModel, TokenId

__all__ = [
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorResponse",
    "Health",
    "ModelCard",
    "ModelList",
    "TokenizeChatRequest",
    "TokenizePromptRequest",
    "TokenizeResponse",
    "Version",
]


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    failure_id: NotRequired[str]


class ErrorResponse(TypedDict):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizePromptRequest(RequestModel):
    """Text to count and cut."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ConversationFields):
    """A conversation to count and cut, through the chat template."""

    model: str | None = None
    add_special_tokens: bool | None = False
    return_token_strs: bool | None = False


class TokenizeResponse(TypedDict):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Token ids to put together."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**22)]


class DetokenizeResponse(TypedDict):
    """Text."""

    prompt: str


class Health(TypedDict):
    """The engine's state."""

    status: Literal["starting", "ready", "restarting", "dead", "stopping"]


class Version(TypedDict):
    """The server's version."""

    version: str
