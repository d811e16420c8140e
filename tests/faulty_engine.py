"""An engine process in which prompts do harm: ``[--kill-in-load] SOCKET STACKS``.

The first token of a prompt says what happens in each step that it is in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from engine.compose import Engine, build_engine
from engine.memory.resources import HostMemoryResource
from engine.memory.scope import memory_scope, request_scope
from engine.process import run_engine
from engine.runner import LaunchedStep
from engine.scheduler import ScheduledRequest

THROWS, HANGS, KILLS, TOO_LARGE, KILLS_ALLOCATING, SLOW = range(40, 46)
"""first tokens; the last only makes each of its steps take 20 ms"""


def do_harm(engine: Engine, item: ScheduledRequest) -> None:
    """What the prompt of `item` asks for."""
    token = int(item.request.prompt_token_ids[0])
    with request_scope([item.request.request_id]):
        if token == THROWS:
            raise RuntimeError("a kernel went astray")
        if token == HANGS:
            time.sleep(3600)
        elif token == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        elif token == TOO_LARGE:
            with memory_scope("workspace/too_large"):
                engine.house.resource.allocate(1 << 50)
        elif token == KILLS_ALLOCATING:
            _kill_allocating(engine)
        elif token == SLOW:
            time.sleep(0.02)


def _kill_allocating(engine: Engine) -> None:
    """Die inside the resource, as in a driver that crashes."""
    harmful: Any = HostMemoryResource
    harmful._map = lambda resource, size: os.kill(os.getpid(), signal.SIGKILL)
    with memory_scope("workspace/last"):
        engine.house.resource.allocate(4096)


def build(*arguments: Any, **keywords: Any) -> Engine:
    """`build_engine`, with a runner that looks at the prompts first."""
    engine = build_engine(*arguments, **keywords)
    runner: Any = engine.core._runner
    launch = runner.launch

    def harmful(batch: Sequence[ScheduledRequest]) -> LaunchedStep:
        for item in batch:
            do_harm(engine, item)
        step: LaunchedStep = launch(batch)
        return step

    runner.launch = harmful
    return engine


if __name__ == "__main__":
    if "--kill-in-load" in sys.argv:
        threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    sys.exit(run_engine(int(sys.argv[-2]), int(sys.argv[-1]), build=build))
