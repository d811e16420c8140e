"""The figures of a load: throughput, and the distributions of what clients waited for.

Names are those of ``vllm bench serve``'s results, so that what reads one reads the other. Beside them:
``…_from_arrival`` (from when a request was due, not from when it was sent), ``start_delay`` (between the
two), and ``error_counts``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from app.benchmark.load import LoadSettings
from app.benchmark.outcome import Outcome
from app.open_ai import is_chat

__all__ = ["details", "report", "report_lines"]

PERCENTILES = (50, 90, 99)
_MAX_ERRORS_SHOWN = 10
_LATE_MS = 50.0
"""a client that sends later than this cannot keep up"""

_LABELS = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2el": "end-to-end latency",
    "ttft_from_arrival": "TTFT from arrival",
    "e2el_from_arrival": "end-to-end from arrival",
}


def report(
    settings: LoadSettings, outcomes: Sequence[Outcome], seconds: float, *, unfinished: int = 0
) -> dict[str, Any]:
    """Everything in plain types. Latencies are in milliseconds, and 0 where nothing was measured.

    Parameters
    ----------
    outcomes
        Of the requests that ended. Tokens and latencies are of those that succeeded.
    seconds
        How long the load took.
    unfinished
        Requests that an interruption left.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    prompt = sum(outcome.prompt_tokens for outcome in done)
    output = sum(outcome.output_tokens for outcome in done)
    figures: dict[str, Any] = {
        "backend": "openai-chat" if is_chat(settings.endpoint) else "openai",
        "base_url": settings.base_url,
        "endpoint": settings.endpoint,
        "model_id": settings.model,
        "num_prompts": len(outcomes) + unfinished,
        "request_rate": "inf" if math.isinf(settings.rate) else settings.rate,
        "max_concurrency": settings.max_concurrency,
        "seed": settings.seed,
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "unfinished": unfinished,
        "without_usage": sum(not outcome.has_usage for outcome in done),
        "error_counts": dict(errors.most_common()),
        "max_concurrent_requests": _most_at_once(outcomes),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    latencies: dict[str, Iterable[float | None]] = {
        "ttft": (outcome.ttft for outcome in done),
        "tpot": (outcome.tpot for outcome in done),
        "itl": (gap for outcome in done for gap in outcome.inter_token_latencies),
        "e2el": (outcome.latency for outcome in done),
        "ttft_from_arrival": (outcome.ttft_from_arrival for outcome in done),
        "e2el_from_arrival": (outcome.latency_from_arrival for outcome in done),
        "start_delay": (outcome.start_delay for outcome in outcomes),
    }
    for name, values in latencies.items():
        figures |= _distribution(name, [value for value in values if value is not None])
    return figures


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Every request, in the order of arrival: lists under vLLM's names, in seconds and tokens."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.due)
    return {
        "arrival_times": [outcome.due for outcome in ordered],
        "start_times": [outcome.begun for outcome in ordered],
        "input_lens": [outcome.prompt_tokens for outcome in ordered],
        "output_lens": [outcome.output_tokens for outcome in ordered],
        "ttfts": [outcome.ttft for outcome in ordered],
        "itls": [outcome.inter_token_latencies for outcome in ordered],
        "e2els": [outcome.latency for outcome in ordered],
        "errors": [outcome.error or "" for outcome in ordered],
    }


def report_lines(figures: dict[str, Any]) -> list[str]:
    """A table for a person, and a line for each kind of error."""
    ended = f"{figures['completed']} requests completed, {figures['failed']} failed"
    if figures["unfinished"]:
        ended += f", {figures['unfinished']} unfinished"
    lines = [
        f"{ended}, in {figures['duration']:.2f} s; at most {figures['max_concurrent_requests']} at once",
        f"{figures['request_throughput']:.2f} requests/s, "
        f"{figures['output_throughput']:.1f} output tokens/s, "
        f"{figures['total_token_throughput']:.1f} tokens/s with prompts",
        f"{figures['total_input_tokens']} prompt tokens, {figures['total_output_tokens']} output tokens",
    ]
    if figures["completed"]:
        columns = ("mean", *(f"p{rank}" for rank in PERCENTILES), "max")
        lines += ["", f"{'ms':30}" + "".join(f"{column:>11}" for column in columns)]
        for name, label in _LABELS.items():
            values = (figures[f"{column}_{name}_ms"] for column in columns)
            lines.append(f"{label:30}" + "".join(f"{value:11.1f}" for value in values))
    lines += _notes(figures)
    errors = list(figures["error_counts"].items())
    lines += [f"{count} x {error}" for error, count in errors[:_MAX_ERRORS_SHOWN]]
    if len(errors) > _MAX_ERRORS_SHOWN:
        lines.append(f"… and {len(errors) - _MAX_ERRORS_SHOWN} other errors; --output json has all")
    return lines


def _notes(figures: dict[str, Any]) -> list[str]:
    """What makes figures worth less than they look."""
    notes = []
    if count := figures["without_usage"]:
        notes.append(f"note: {count} answers came without usage: an event counts as a token there")
    delay = figures["p99_start_delay_ms"]
    if figures["max_concurrency"] is None and delay > _LATE_MS:
        notes.append(
            f"note: this client could not keep up: it sent requests up to {delay:.0f} ms (p99) after arrival"
        )
    return notes


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Figures of one latency, in milliseconds."""
    values = 1000 * np.array(seconds or [0.0])
    figures = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.median(values),
        f"std_{name}_ms": values.std(),
        **{f"p{rank}_{name}_ms": np.percentile(values, rank) for rank in PERCENTILES},
        f"max_{name}_ms": values.max(),
    }
    return {key: float(value) for key, value in figures.items()}


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way at one time. One that ends as another begins is not."""
    changes = [(outcome.begun, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
