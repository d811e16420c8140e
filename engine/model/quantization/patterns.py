"""Regular expressions over module names that a checkpoint brings along, matched within a time limit."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable
from math import prod

import regex

from engine.errors import CheckpointError
from engine.model.files import shown, text_shown

__all__ = ["ModulePatterns"]

_LONGEST = 2_000
"""characters of a pattern"""
_MOST_REPEATS = 1_000
"""of counted repetitions, nested: each is compiled that many times over"""
_SECONDS = 10.0
"""for all names together; tens of thousands take a part of one"""

_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class ModulePatterns:
    """Patterns of which any may match a module's name from its start on.

    Python's own ``re`` says what a pattern is, and cannot be stopped: one of a few characters takes years for
    some names. So the regex library matches, with what is left of `_SECONDS`.

    Parameters
    ----------
    where
        The file and field, for errors.

    Raises
    ------
    CheckpointError
        A pattern is no regular expression, or a very large one.
    """

    def __init__(self, patterns: Iterable[str], where: str) -> None:
        self._where = where
        self._patterns = [_compiled(pattern, where) for pattern in patterns]
        self._left = _SECONDS

    def match(self, module: str) -> bool:
        """Raises CheckpointError when the time is up."""
        for pattern in self._patterns:
            start = time.monotonic()
            try:
                found = pattern.match(module, timeout=self._left)
            except TimeoutError:
                found = None
            self._left -= time.monotonic() - start
            if found is not None:
                return True
            if self._left <= 0:
                raise CheckpointError(
                    f"{self._where}: {shown(pattern.pattern)} takes too long to match {text_shown(module)}"
                )
        return False


def _compiled(pattern: str, where: str) -> regex.Pattern[str]:
    if len(pattern) > _LONGEST:
        raise CheckpointError(
            f"{where}: expected patterns of {_LONGEST} characters at most, found {shown(pattern)}"
        )
    counts = [max(int(n or 1) for n in found if n is not None) for found in _COUNT.findall(pattern)]
    # Braces that are no counts mean other things to the regex library.
    if "{" in _COUNT.sub("", pattern) or prod(max(n, 1) for n in counts) > _MOST_REPEATS:
        raise CheckpointError(
            f"{where}: {shown(pattern)}: expected braces for counts only, of {_MOST_REPEATS} at most"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that may mean something else one day
            re.compile(pattern)
            return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where}: {shown(pattern)} is no regular expression: {text_shown(str(error))}"
        ) from None
