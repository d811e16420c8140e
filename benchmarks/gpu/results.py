"""A part's results: a JSON file that is whole after every finding, so that a part that dies loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Results:
    """What one part found. `failed` is what must be empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"failed": [], "finished": False}
        self.save()

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.save()

    def check(self, ok: bool, what: str) -> bool:
        """Note `what` as failed unless `ok`."""
        if not ok:
            self.found["failed"].append(what)
            print(f"FAILED: {what}", flush=True)
            self.save()
        return ok

    def finish(self) -> None:
        self.put("finished", True)

    def save(self) -> None:
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(self.found, indent=1, default=str) + "\n")
        os.replace(beside, self.path)


def commit() -> str:
    """The checkout's commit, "unknown" where there is no repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
