"""What routes are handed: the engine, its figures, and the names that it is served under."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.generation import Prompt, off_the_loop
from app.http_errors import ApiError, public_text, unavailable
from app.metrics import ServerMetrics
from app.protocol.chat import ConversationFields, conversation
from app.protocol.other import ModelCard
from app.serving_engine import EngineState, ServingEngine
from engine.model.tokenizer import Tokenizer

__all__ = ["Service"]


@dataclass(slots=True, eq=False)
class Service:
    """An engine that is served."""

    engine: ServingEngine
    metrics: ServerMetrics
    model_names: Sequence[str]
    """the first is the one that responses carry; requests may use any"""
    priority_scheduling: bool = False
    """the engine heeds priorities"""
    stopping: bool = False
    """no more requests are taken: the server drains"""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def status(self) -> str:
        """The engine's state, or ``stopping``."""
        return "stopping" if self.stopping else self.engine.state.value

    @property
    def ready(self) -> bool:
        return not self.stopping and self.engine.state is EngineState.READY

    def check_open(self) -> None:
        """Refuse requests while the server stops. Raises ApiError, 503."""
        if self.stopping:
            raise unavailable("the server is stopping")

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None is the one that is. Raises ApiError, 404."""
        if name is not None and name not in self.model_names:
            names = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"model: {public_text(name)[:200]!r} is not served; expected {names}",
                param="model",
                code="model_not_found",
            )

    def check_priority(self, priority: int | None) -> None:
        """Refuse a priority where nothing heeds it. Raises ApiError, 400."""
        if priority and not self.priority_scheduling:
            raise ApiError(
                400,
                "priority: expected 0: the server runs without --scheduling-policy priority",
                param="priority",
            )

    def model_card(self, name: str) -> ModelCard:
        """What /v1/models tells of a name."""
        limits = self.engine.limits
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "vtserve",
            "root": self.model_name,
            "parent": None,
            "max_model_len": None if limits is None else limits.max_model_len,
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError, 503, before the engine was ready."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise unavailable(f"the engine is {self.status}", self.engine.last_failure_id)
        return tokenizer

    async def text_prompt(self, text: str, *, add_special_tokens: bool | None) -> Prompt:
        """A prompt that was given as text; None adds special tokens. Raises RequestError."""
        tokenizer, special = self.tokenizer, add_special_tokens is not False
        ids = await off_the_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
        return Prompt(text, ids)

    async def chat_prompt(self, fields: ConversationFields, *, add_special_tokens: bool | None) -> Prompt:
        """A conversation as the model's chat template writes it; special tokens are in it, None adds none.

        Raises
        ------
        ApiError, RequestError
            A message is not text, or the template refuses.
        """
        tokenizer, messages = self.tokenizer, conversation(fields)

        def render() -> Prompt:
            text = tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=fields.add_generation_prompt is not False,
                variables=fields.chat_template_kwargs,
            )
            return Prompt(text, tokenizer.encode(text, add_special_tokens=bool(add_special_tokens)))

        size = sum(len(str(message.get("content", ""))) for message in messages)
        return await off_the_loop(size, render)
