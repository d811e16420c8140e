"""Serves a `LocalEngine` on a free port of this machine, in a process of its own: ``CHECKPOINT [SECONDS]``.

The first line on standard output is the server's URL; lines for a person follow.
"""

from __future__ import annotations

import io
import sys

import anyio

from app.closing import OpenStreams
from app.metrics import ServerMetrics
from app.server import ServerSettings, create_app
from app.service import Service
from app.serving import bind, serve, url_of
from engine.compose import build_engine
from engine.config import EngineConfig
from engine.memory.settings import TraceSettings
from tests.app.local_engine import LocalEngine


async def main(checkpoint: str, shutdown_timeout: float) -> int:
    config = EngineConfig(
        model=checkpoint, device="cpu", kv_cache_memory=16 << 20, threads=1, max_model_len=512
    )
    inner = build_engine(config, trace=TraceSettings(), output=io.StringIO(), environ={})
    engine = LocalEngine(inner)
    engine.core_is_slow = True
    service = Service(engine, ServerMetrics(engine, "tiny"), ["tiny"])
    streams, exhausted = OpenStreams(), anyio.Event()
    app = create_app(service, ServerSettings(), streams=streams)

    @app.post("/test/exhaust")
    async def exhaust() -> None:
        exhausted.set()

    def say(line: str) -> None:
        print(line, flush=True)

    listener = bind("127.0.0.1", 0)
    say(url_of(listener))
    return await serve(
        app,
        listener,
        service,
        streams,
        drain=engine.drain,
        exhausted=exhausted,
        shutdown_timeout=shutdown_timeout,
        say=say,
    )


if __name__ == "__main__":
    sys.exit(anyio.run(main, sys.argv[1], float(sys.argv[2])))
