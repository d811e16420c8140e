"""The figures of a load: throughput, and the distribution of what clients waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from app.benchmark.load import LoadSettings, Outcome

__all__ = ["percentile", "report", "report_lines"]

_PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], rank: float) -> float:
    """The `rank`-th percentile, between neighbours in proportion (as NumPy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def report(settings: LoadSettings, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Everything in plain types. Times are milliseconds; a distribution without values is None."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    output = sum(outcome.output_tokens for outcome in done)
    prompt = sum(outcome.prompt_tokens for outcome in done)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    begins = [(outcome.begun, 1) for outcome in outcomes]
    ends = [(outcome.ended, -1) for outcome in outcomes]
    running = most = 0
    for _, step in sorted([*begins, *ends]):
        running += step
        most = max(most, running)
    return {
        "model": settings.model,
        "endpoint": "chat" if settings.chat else "completions",
        "request_rate": None if settings.rate == float("inf") else settings.rate,
        "max_concurrency": settings.max_concurrency,
        "seconds": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(errors.most_common()),
        "most_at_once": most,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (output + prompt) / seconds,
        "ttft_ms": _distribution([o.first_token for o in done if o.first_token is not None]),
        "tpot_ms": _distribution([o.per_output_token for o in done if o.per_output_token is not None]),
        "itl_ms": _distribution([gap for outcome in done for gap in outcome.gaps]),
        "latency_ms": _distribution([outcome.latency for outcome in done]),
        "latency_from_due_ms": _distribution([outcome.latency_from_due for outcome in done]),
    }


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    figures = {"mean": sum(values) / len(values)}
    figures |= {f"p{rank}": percentile(values, rank) for rank in _PERCENTILES}
    figures["max"] = max(values)
    return {name: 1000 * value for name, value in figures.items()}


def report_lines(figures: dict[str, Any]) -> list[str]:
    """A table for a person."""
    lines = [
        f"{figures['completed']} requests completed, {figures['failed']} failed, "
        f"in {figures['seconds']:.2f} s, at most {figures['most_at_once']} at once",
        f"{figures['requests_per_second']:.2f} requests/s, "
        f"{figures['output_tokens_per_second']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_second']:.1f} tokens/s with prompts",
        "",
        f"{'ms':24}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name, label in _LABELS.items():
        if (values := figures[name]) is not None:
            lines.append(f"{label:24}" + "".join(f"{value:10.1f}" for value in values.values()))
    lines += [f"{count} x {error}" for error, count in figures["errors"].items()]
    return lines


_LABELS = {
    "ttft_ms": "first token (TTFT)",
    "tpot_ms": "each other token (TPOT)",
    "itl_ms": "between events (ITL)",
    "latency_ms": "whole request",
    "latency_from_due_ms": "whole, from when due",
}
