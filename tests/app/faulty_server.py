"""``vtserve serve`` over an engine in which prompts do harm: takes its flags."""

from __future__ import annotations

import sys

from app.cli import main
from app.engine_process import EngineCommand

if __name__ == "__main__":
    command = EngineCommand([sys.executable, "-P", "-m", "tests.faulty_engine"])
    main(["serve", *sys.argv[1:]], obj=command)
