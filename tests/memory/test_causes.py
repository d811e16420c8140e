"""The table of causes is whole, and is the manual's."""

from __future__ import annotations

import re
from pathlib import Path

from engine.memory.causes import CAUSES
from engine.memory.errors import Why

ROOT = Path(__file__).resolve().parents[2]


def test_every_classification_has_a_cause() -> None:
    assert set(CAUSES) == set(Why)


def test_the_manual_has_the_same_table() -> None:
    text = (ROOT / "docs" / "ALLOC_TRACE.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (.*?) ?\|$", text.partition("| `why` |")[2], re.M)
    shown = {name: (meaning, helps) for name, meaning, helps in rows[: len(Why)]}
    assert shown == {why.value: (cause.meaning, cause.helps) for why, cause in CAUSES.items()}


def test_every_cause_is_produced_by_a_test() -> None:
    """Where a resource or an adaptor tells it."""
    tests = "".join(
        (ROOT / "tests" / "memory" / name).read_text()
        for name in ("test_resources.py", "test_adaptors.py", "cuda/test_resources.py")
    )
    for why in Why:
        assert f"Why.{why.name}" in tests, why
