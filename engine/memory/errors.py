"""The memory branch of the exception tree, and its root.

The root lives here because the memory house imports nothing else of `engine`; `engine.errors` draws the whole tree.
"""

from __future__ import annotations


class VtserveError(Exception):
    """Root of every error that vtserve raises on purpose. Its text is one line that a user can act on."""
