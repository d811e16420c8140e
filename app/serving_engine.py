"""The engine as the HTTP surface sees it: its state, what can be asked of it, and how it says no.

`app.engine_client.EngineClient` is one, in a process of its own; tests bring their own.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from engine.config import EngineLimits
from engine.errors import VtserveError
from engine.messages import AddRequest, EngineStats
from engine.model.tokenizer import Tokenizer
from engine.outputs import CompletionDelta

__all__ = ["EngineState", "QueueFullError", "ServingEngine"]


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """it died; a new one is being made"""
    DEAD = "dead"
    """it died, and no restarts are left"""


class QueueFullError(VtserveError):
    """As many requests wait as may. Ask again in `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServingEngine(Protocol):
    """What routes ask of the engine. Reading a property never waits."""

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None until the engine was ready for the first time."""

    @property
    def limits(self) -> EngineLimits | None:
        """What the engine was built for; None until it was ready for the first time."""

    @property
    def stats(self) -> EngineStats | None:
        """Of the latest step."""

    @property
    def restarts(self) -> int:
        """How often the engine was started again."""

    @property
    def last_failure_id(self) -> str | None:
        """The newest failure record's."""

    def ledger(self) -> Mapping[str, Any] | None:
        """The latest ledger known, as `Ledger.to_dict` has it; kept while the engine is dead."""

    def alloc_failures(self) -> Mapping[str, int]:
        """Requests for memory that failed, by their classification, over all engines of this server."""

    def generate(self, request: AddRequest, text: str | None) -> AsyncIterator[CompletionDelta]:
        """Completions of `request`, piece by piece. Closing the iterator aborts it in the engine.

        Raises
        ------
        QueueFullError
            As many requests wait as may.
        EngineDeadError
            The engine is not there; `failure_id` tells more.
        RequestError
            It cannot be served as asked.
        """
