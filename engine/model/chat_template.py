"""Conversations to prompts: a model's chat template, as transformers renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import TemplateSyntaxError

from engine.errors import CheckpointError, RequestError
from engine.model.files import shown, text_shown
from engine.model.template_sandbox import LimitedEnvironment

__all__ = ["ChatTemplate"]

_LARGEST = 1 << 20
"""bytes of a template's source; the longest in use take some 20,000"""
_DEPTH = 64
"""of JSON in a conversation"""


class ChatTemplate:
    """One or several named templates of a model.

    Parameters
    ----------
    templates
        By name; ``default`` is used where none is asked for, ``tool_use`` where there are tools.
    variables
        What every conversation gets: ``bos_token`` and its like.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        self._templates = templates
        self._variables = variables
        self._compiled: dict[str, CodeType] = {}

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any], variables: Mapping[str, Any]) -> ChatTemplate:
        """chat_template.jinja and additional_chat_templates/NAME.jinja; without the first, what
        tokenizer_config.json (`settings`) holds: one template, or a list of named ones.

        Raises
        ------
        CheckpointError
            A file cannot be read, is no UTF-8, or is larger than any template.
        """
        templates = {}
        held = settings.get("chat_template")
        if isinstance(held, str):
            templates["default"] = held
        elif isinstance(held, list):
            for entry in held:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    templates[str(entry.get("name"))] = entry["template"]
        files = {"default": path / "chat_template.jinja"}
        files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        for name, file in files.items():
            if file.is_file():
                templates[name] = _read(file)
        return cls(templates, variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Parameters
        ----------
        messages
            ``role``, ``content`` and what else the template knows; a key that is null counts as absent.
        add_generation_prompt
            Whether the answer's beginning is part of it.
        tools
            JSON schemas of functions that may be called.
        name
            Which template, if there are several.
        variables
            More for the template, such as ``enable_thinking``.

        Raises
        ------
        RequestError
            There is no such template, or it refuses, fails, or does more than a prompt needs
            (`engine.model.template_sandbox`).
        """
        chosen = self._choose(name, tools)
        everything = {
            **self._variables,
            **(variables or {}),
            "messages": [
                {key: value for key, value in message.items() if value is not None} for message in messages
            ],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        environment = LimitedEnvironment()
        try:
            if chosen not in self._compiled:
                source = self._templates[chosen]
                self._compiled[chosen] = environment.compile(source, "chat template")
            return environment.render(self._compiled[chosen], _plain(everything))
        except TemplateSyntaxError as error:
            raise _fault(f"the model's chat template is no template: line {error.lineno}: {error}") from None
        except RequestError:
            raise
        except Exception as error:  # a template can raise about anything that Python can
            raise _fault(f"the chat template refused: {str(error) or type(error).__name__}") from None

    def _choose(self, name: str | None, tools: object) -> str:
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if not self._templates:
            raise _fault("the model has no chat template")
        if name not in self._templates:
            raise _fault(
                f"the model has no chat template {name!r}; expected one of {', '.join(self._templates)}"
            )
        return name


def _fault(reason: str) -> RequestError:
    return RequestError(f"messages: {text_shown(reason)}", field="messages")


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` made of JSON's types only: methods of others are none of a template's business."""
    if depth > _DEPTH:
        raise _fault(f"expected JSON nested {_DEPTH} deep at most")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise _fault(f"expected JSON, found {shown(value)}")


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise CheckpointError(f"{file}: larger than {_LARGEST >> 20} MiB; expected a chat template")
        return data.decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8: {error}") from None
