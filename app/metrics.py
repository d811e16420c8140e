"""Figures for Prometheus, in a registry of their own: vLLM's names where the meaning is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.serving_engine import EngineState, ServingEngine
from engine.messages import AddRequest, FinishReason
from engine.outputs import CompletionDelta

__all__ = ["CONTENT_TYPE", "RequestClock", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, so that its dashboards show these.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_NEXT_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))


class ServerMetrics:
    """What this server has done, and how its engine stands. Reading them asks nothing of the engine."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*labels, *more), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self._registry).labels(model_name)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests.").labels(model_name)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(model_name)
        success = counter("vllm:request_success", "Completions that ended well, by why.", "finished_reason")
        self._success = {
            reason: success.labels(model_name, reason.value)
            for reason in (FinishReason.STOP, FinishReason.LENGTH)
        }
        failures = counter("vtserve_request_failure", "Completions that failed, by why.", "finished_reason")
        self._failures = {
            reason: failures.labels(model_name, reason.value)
            for reason in (FinishReason.ABORT, FinishReason.ERROR)
        }
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN
        )
        self._next_token = histogram(
            "vllm:inter_token_latency_seconds", "From one token to the next.", _NEXT_TOKEN
        )
        self._request = histogram("vllm:e2e_request_latency_seconds", "From a request to its end.", _REQUEST)
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_generation = histogram(
            "vllm:request_generation_tokens", "Tokens of a completion.", _TOKENS
        )
        self._registry.register(_EngineCollector(engine, model_name))

    def start(self, request: AddRequest) -> RequestClock:
        """A clock for a request that begins now."""
        self._prompt_tokens.inc(len(request.prompt_token_ids))
        self._request_prompt.observe(len(request.prompt_token_ids))
        return RequestClock(self, request.params.n)

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestClock:
    """Times one request with its `n` completions."""

    def __init__(self, metrics: ServerMetrics, n: int) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: list[float | None] = [None] * n
        self._tokens = [0] * n
        self._first_seen = False

    def observe(self, delta: CompletionDelta) -> None:
        """Count what came, now."""
        metrics, now, count = self._metrics, time.perf_counter(), len(delta.token_ids)
        if count:
            last = self._last[delta.index]
            if not self._first_seen:
                self._first_seen = True
                metrics._first_token.observe(now - self._start)
            if last is not None:
                metrics._next_token.observe((now - last) / count)
            self._last[delta.index] = now
            self._tokens[delta.index] += count
            metrics._generation_tokens.inc(count)
        reason = delta.finish_reason
        if reason is None:
            return
        if (success := metrics._success.get(reason)) is not None:
            success.inc()
            metrics._request.observe(now - self._start)
            metrics._request_generation.observe(self._tokens[delta.index])
        else:
            metrics._failures[reason].inc()


class _EngineCollector(Collector):
    """The engine's figures, as they stand when somebody reads."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        engine = self._engine
        ready = engine.state is EngineState.READY
        yield self._gauge("vtserve_engine_up", "1 while the engine is ready.", ready)
        yield self._counter("vtserve_engine_restarts", "Times the engine was started again.", engine.restarts)
        if (stats := engine.stats) is not None:
            yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", stats.num_running)
            yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting)
            yield self._gauge(
                "vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", stats.kv_cache_usage
            )
            yield self._counter("vllm:num_preemptions", "Sequences put back.", stats.preemptions)
            yield self._counter(
                "vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.", stats.prefix_queries
            )
            yield self._counter("vllm:prefix_cache_hits", "Tokens found in it.", stats.prefix_hits)
        if (ledger := engine.ledger()) is not None:
            yield from self._memory(ledger)
        failures = CounterMetricFamily(
            "vtserve_alloc_failures", "Requests for memory that failed, by why.", labels=["why"]
        )
        for why, count in engine.alloc_failures().items():
            failures.add_metric([why], count)
        yield failures

    def _memory(self, ledger: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
        live = GaugeMetricFamily(
            "vtserve_memory_bytes", "Live bytes by the tags' first segments.", labels=["tag"]
        )
        for segment, size in ledger["segments"].items():
            live.add_metric([segment], size)
        yield live
        other = GaugeMetricFamily(
            "vtserve_memory_overhead_bytes", "Bytes that no tag has, by what they are.", labels=["what"]
        )
        for what in ("pool_slack", "rounding", "context", "library", "other_processes", "bypass", "residual"):
            other.add_metric([what], ledger[what])
        yield other
        yield GaugeMetricFamily("vtserve_memory_total_bytes", "The device's memory.", value=ledger["total"])
        yield GaugeMetricFamily("vtserve_memory_free_bytes", "Free bytes of it.", value=ledger["free"])

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family
