"""What is imported at run time is what an installation without extras brings."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normalized(requirement: str) -> str:
    """The name in a requirement, as PEP 503 spells it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name.group()).lower()


DECLARED = {normalized(requirement) for requirement in PROJECT["dependencies"]}
OPTIONAL = {"cupti": "observe", "google": "export", "perfetto": "export"}
"""extras by what they bring: imported where they are asked for, and missed in one line"""
PINNED = {"llvmlite": "numba", "pydantic-core": "pydantic"}
"""what a declared distribution needs in one version alone: declaring it too could only contradict that"""


def imported_names() -> Iterator[tuple[str, Path]]:
    """Absolute module names that the packages import, wherever in a file."""
    for folder in ("app", "engine"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((alias.name, path) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    yield node.module, path
                    yield from ((f"{node.module}.{alias.name}", path) for alias in node.names)


def owners() -> dict[str, set[str]]:
    """Distributions by the packages and modules that they install, ``cuda.core`` as well as ``regex``."""
    found: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        for file in distribution.files or ():
            parts = file.with_suffix("").parts if file.suffix in (".py", ".so", ".pyi") else ()
            for length in (1, 2):
                if len(parts) >= length:
                    found.setdefault(".".join(parts[:length]), set()).add(normalized(distribution.name))
    return found


def test_every_import_is_declared() -> None:
    by_module = owners()
    missing = set()
    count = 0
    for name, path in imported_names():
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("app", "engine", "__future__"):
            continue
        if top in OPTIONAL:
            assert OPTIONAL[top] in PROJECT["optional-dependencies"]
            continue
        count += 1
        # A namespace's distributions are told apart by the level below.
        names = by_module.get(".".join(name.split(".")[:2])) or by_module.get(top)
        assert names, f"{path}: {name} is not installed"
        if not {PINNED.get(owner, owner) for owner in names} & DECLARED:
            missing.add(f"{path.relative_to(ROOT)}: {name} comes from {', '.join(sorted(names))}")
    assert count > 100
    assert not missing


def test_cuda_core_has_its_bindings() -> None:
    """It imports them, and declares them for some of its extras only."""
    assert "cuda-bindings" in DECLARED
