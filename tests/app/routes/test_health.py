"""``/health``, ``/ping``, ``/version``, ``/metrics`` and ``/v1/models``."""

from __future__ import annotations

from importlib import metadata

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.service import Service
from app.serving_engine import EngineState
from tests.app.conftest import MODEL
from tests.app.local_engine import LocalEngine


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_200_only_while_the_engine_is_ready(
    http: httpx.AsyncClient, engine: LocalEngine, service: Service, path: str
) -> None:
    assert (await http.get(path)).json() == {"status": "ready"}
    engine.last_failure_id = "F9"
    for state in EngineState:
        engine.state = state
        response = await http.get(path)
        assert response.status_code == (200 if state is EngineState.READY else 503)
        assert state.value in response.text
        assert ("F9" in response.text) is (state in (EngineState.RESTARTING, EngineState.DEAD))
    engine.state = EngineState.READY
    service.stopping = True
    response = await http.get(path)
    assert response.status_code == 503
    assert "stopping" in response.json()["error"]["message"]


async def test_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": metadata.version("vtserve")}


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == [MODEL, "other/name"]
    assert listed[0].model_dump()["max_model_len"] == 512
    assert (await client.models.retrieve("other/name")).model_dump()["root"] == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_a_second_name_is_answered_with_the_first(client: openai.AsyncOpenAI) -> None:
    response = await client.completions.create(model="other/name", prompt="x", max_tokens=1)
    assert response.model == MODEL


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    """Prometheus' own reader on what is served: name and the label that is not the model, to value."""
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found["/".join([sample.name, *labels])] = sample.value
    return found


async def test_metrics_count_what_was_done(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, engine: LocalEngine
) -> None:
    before = await figures(http)
    assert before["vllm:generation_tokens_total"] == 0
    extra: dict[str, object] = {"ignore_eos": True}
    await client.completions.create(model=MODEL, prompt=[1, 2, 3], n=2, max_tokens=5, extra_body=extra)
    await client.completions.create(
        model=MODEL,
        prompt=[1, 2],
        max_tokens=9,
        temperature=0,
        logit_bias={"7": 100},
        extra_body={"stop_token_ids": [7]},
    )
    after = await figures(http)
    assert after["vllm:prompt_tokens_total"] == 5
    assert after["vllm:generation_tokens_total"] == 11
    assert after["vllm:request_success_total/length"] == 2
    assert after["vllm:request_success_total/stop"] == 1
    assert after["vllm:time_to_first_token_seconds_count"] == 2
    assert after["vllm:inter_token_latency_seconds_count"] == 8
    assert after["vllm:e2e_request_latency_seconds_count"] == 3
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["vtserve_engine_up"] == 1
    assert after["vtserve_engine_restarts_total"] == 0


async def test_metrics_have_the_ledger_and_it_closes(http: httpx.AsyncClient, engine: LocalEngine) -> None:
    engine.failures = {"cap": 2, "full": 1}
    engine.restarts = 3
    found = await figures(http)
    tags = {name: value for name, value in found.items() if name.startswith("vtserve_memory_bytes/")}
    assert tags["vtserve_memory_bytes/kv"] == engine.inner.kv_bytes
    assert tags["vtserve_memory_bytes/weights"] > 0
    overheads = sum(v for name, v in found.items() if name.startswith("vtserve_memory_overhead_bytes/"))
    assert found["vtserve_memory_total_bytes"] == (
        found["vtserve_memory_free_bytes"] + sum(tags.values()) + overheads
    )
    assert found["vtserve_alloc_failures_total/cap"] == 2
    assert found["vtserve_alloc_failures_total/full"] == 1
    assert found["vtserve_engine_restarts_total"] == 3
