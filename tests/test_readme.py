"""What the README shows must be what its reader sees."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_lines_of_code_it_names_allocate() -> None:
    named = set(re.findall(r"\b(engine/[\w/]+\.py):(\d+)", (ROOT / "README.md").read_text()))
    assert named
    for file, number in named:
        line = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert "empty(" in line, f"{file}:{number}: {line.strip()}"
