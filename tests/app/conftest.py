"""A served engine for the routes' tests: whole, in this process, over a small checkpoint."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from app.metrics import ServerMetrics
from app.server import ServerSettings, create_app
from app.service import Service
from engine.compose import Engine, build_engine
from engine.config import EngineConfig
from engine.memory.settings import TraceSettings
from tests.app.local_engine import LocalEngine

MODEL = "tiny"


@pytest.fixture(scope="session")
def checkpoint(shared_checkpoints: Path) -> Path:
    """One whose greedy tokens all lead by more than 0.05, so that no rounding exchanges two."""
    return shared_checkpoints / "qwen2" / "NVFP4-modelopt"


@pytest.fixture(scope="session")
def reference(shared_checkpoints: Path) -> list[dict[str, Any]]:
    """What transformers computed: prompts, token ids, greedy tokens."""
    path = shared_checkpoints / "qwen2" / "ref-NVFP4-modelopt.json"
    prompts: list[dict[str, Any]] = json.loads(path.read_text())["prompts"]
    return prompts


@pytest.fixture(scope="session")
def built_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        kv_cache_dtype="bfloat16",
        kv_cache_memory=16 << 20,
        threads=1,
        max_model_len=512,
        max_logits_rows=512,
        failure_dir=str(tmp_path_factory.mktemp("failures")),
    )
    trace = TraceSettings(trace=True, min_bytes=1 << 40)
    engine = build_engine(config, trace=trace, output=io.StringIO(), environ={})
    yield engine
    engine.close()


@pytest.fixture
def engine(built_engine: Engine) -> Iterator[LocalEngine]:
    local = LocalEngine(built_engine)
    yield local
    assert not local.unfinished, "a request was left in the engine"
    assert local.used_blocks == 0, "a request left blocks behind"


@pytest.fixture
def service(engine: LocalEngine) -> Service:
    return Service(engine, ServerMetrics(engine, MODEL), [MODEL, "other/name"])


@pytest.fixture
def app(service: Service) -> FastAPI:
    return create_app(service, ServerSettings(max_body_bytes=1 << 16))


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the application without a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    """The official client, over `http`."""
    return openai.AsyncOpenAI(api_key="none", base_url="http://localhost/v1", http_client=http, max_retries=0)
