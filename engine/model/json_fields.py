"""Reads fields of a JSON object with their meanings. Every refusal names the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError
from engine.model.files import shown, text_shown

__all__ = ["Fields"]


class Fields:
    """The fields of `raw`, which stands at `where` ("config.json" or "config.json: rope_scaling").

    Null counts as absent, but for `get`.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, separator: str = ": ") -> None:
        self.raw = raw
        self._prefix = f"{where}{separator}"

    def get(self, name: str) -> Any:
        return self.raw.get(name)

    def fault(self, name: str, expected: str) -> CheckpointError:
        """The error that says what `name` is, and what was expected."""
        found = shown(self.raw[name]) if name in self.raw else "nothing"
        return CheckpointError(f"{self._prefix}{text_shown(name)}: expected {expected}, found {found}")

    def count(self, name: str, standard: int | None = None) -> int:
        """An integer from 1 to 2³¹ - 1."""
        value = self._or(name, standard)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            is_large = isinstance(value, int) and value >= 1 << 31
            raise self.fault(name, f"a positive integer{' below 2147483648' if is_large else ''}")
        return value

    def positive(self, name: str, standard: float | None = None) -> float:
        """A finite number above zero."""
        value = self._or(name, standard)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.fault(name, "a positive number")
        try:
            return float(value)
        except OverflowError:
            raise self.fault(name, "a positive number that a float can hold") from None

    def flag(self, name: str, standard: bool) -> bool:
        value = self._or(name, standard)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def text(self, name: str, standard: str | None = None) -> str:
        value = self._or(name, standard)
        if not isinstance(value, str):
            raise self.fault(name, "a string")
        return value

    def names(self, name: str) -> list[str]:
        """A list of strings; empty where it is absent."""
        value = self._or(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.fault(name, "a list of strings")
        return value

    def object(self, name: str) -> Fields | None:
        """A JSON object, whose own fields are named ``name.field``; None where it is absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return Fields(value, f"{self._prefix}{name}", ".")

    def _or(self, name: str, standard: Any) -> Any:
        value = self.raw.get(name)
        return standard if value is None else value
