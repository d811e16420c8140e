"""Whatever the OpenAPI document allows, and much that it does not, is answered without a fault of ours."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from app.failure_store import FailureStore
from app.metrics import ServerMetrics
from app.routes.debug import debug_router
from app.server import ServerSettings, create_app
from app.service import Service
from engine.compose import build_engine
from engine.config import EngineConfig
from engine.memory.house import MemoryHouse
from engine.memory.resources import HostMemoryResource
from engine.memory.settings import TraceSettings
from tests.app.local_engine import LocalEngine


@dataclass
class KnownMemory:
    """What the debug paths tell of."""

    trace_path: Path
    failures: FailureStore = field(default_factory=FailureStore)

    def ledger(self) -> dict[str, Any]:
        return {"total": 1}

    def statistics(self) -> dict[str, Any]:
        return {"total": {}}


@pytest.fixture(scope="module")
def short_app(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Over an engine whose model ends every answer soon."""
    config = EngineConfig(
        model=str(checkpoint), device="cpu", kv_cache_memory=16 << 20, threads=1, max_model_len=24
    )
    engine = build_engine(config, trace=TraceSettings(), output=io.StringIO(), environ={})
    local = LocalEngine(engine)
    source = KnownMemory(tmp_path_factory.mktemp("trace") / "trace")
    house = MemoryHouse.build(HostMemoryResource(1 << 20), TraceSettings(trace=True, file=source.trace_path))
    house.resource.allocate(64).close()
    yield create_app(
        Service(local, ServerMetrics(local, "tiny"), ["tiny"]),
        ServerSettings(),
        debug_routers=[debug_router(source)],
    )
    house.close()
    assert not local.unfinished
    engine.close()


PATHS = {
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"), "POST"),
    **dict.fromkeys(("/v1/models", "/v1/models/{model}"), "GET"),
    **dict.fromkeys(("/health", "/ping", "/version", "/metrics"), "GET"),
    **dict.fromkeys(("/debug/alloc", "/debug/alloc/ledger", "/debug/alloc/stats"), "GET"),
    **dict.fromkeys(("/debug/alloc/failures", "/debug/alloc/failures/{failure_id}"), "GET"),
    "/debug/alloc/export": "GET",
}
NOT_FOUND = {"/v1/models/{model}", "/debug/alloc/failures/{failure_id}"}
"""what a random name asks for is not there"""


REQUIRED = {"prompt", "messages", "tokens"}


@pytest.mark.parametrize("path", PATHS)
def test_no_example_finds_a_500(short_app: FastAPI, path: str) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", short_app)
    operation = schema[path][PATHS[path]]
    seen = set()

    @given(data=st.data())
    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def examples(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # With all fields at once one is always out of range; with few, the others are reached.
            kept = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=3)) if case.body else set()
            case.body = {name: case.body[name] for name in {*kept, *REQUIRED} & set(case.body) - {"model"}}
            # The document allows roles and parts that this model's template does not: half the conversations
            # are plain, so that the other fields are reached behind them.
            if "messages" in case.body and data.draw(st.booleans()):
                case.body["messages"] = [{"role": "user", "content": "Hello"}]
        if path == "/debug/alloc":
            # Whoever follows reads for ever.
            case.query.pop("follow", None)
            case.headers.pop("accept", None)
        response = case.call(headers={"host": "localhost"})
        seen.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            assert set(response.json()["error"]) >= {"message", "type", "param", "code"}

    examples()
    assert 200 in seen or path in NOT_FOUND, seen


def test_the_document_has_every_path_and_loads_nothing_from_elsewhere(short_app: FastAPI) -> None:
    document = short_app.openapi()
    assert set(document["paths"]) == set(PATHS)
    completion = document["paths"]["/v1/completions"]["post"]
    assert set(completion["responses"]) >= {"200", "400", "401", "404", "413", "422", "429", "503"}
    assert set(completion["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
