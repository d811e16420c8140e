"""Traces, for the commands that read them."""

from tests.app.trace.conftest import loaded, make_trace

__all__ = ["loaded", "make_trace"]
