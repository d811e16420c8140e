"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Passes text on up to the first stop string, and holds back an end that may be the beginning of one.

    The outcome is that of the text arriving character by character: the stop string that is complete first
    counts, and of several that are complete at once the longest.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """the stop string that was met"""

    def push(self, text: str, *, search: bool = True) -> str:
        """The text that can be passed on now. Without `search` `text` passes unseen (`min_tokens`)."""
        if not self._strings:
            return text
        if not search:
            return self.flush() + text
        pending = self._held + text
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = pending.find(string)
            if start >= 0:
                candidate = (start + len(string), start, string)
                best = candidate if best is None else min(best, candidate)
        if best is not None:
            end, start, self.found = best
            self._held = ""
            return pending[: end if self._include else start]
        keep = max(_overlap(pending, string) for string in self._strings)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The text held back: no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, without being complete."""
    for length in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
