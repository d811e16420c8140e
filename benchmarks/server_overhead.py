"""What the server costs: the same requests through HTTP streaming and through `LLM`, traced and not.

Eight requests at once, each with a prompt of its own, generate ``--tokens`` tokens. By turns in one run, so
that a busy machine is busy for all: `LLM` in this process; a server; a server with tracing on; that one with
a hundred followers of ``/debug/alloc`` that have read what there was. Ratios are medians over the rounds. The
client reads bytes and nothing more, but it shares the machine: on few cores its work, and that of the
followers, is part of the figure. Prints a table and writes ``benchmarks/results/server_overhead.json``.

    python benchmarks/server_overhead.py --model path/to/checkpoint
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_process import Server

from engine.llm import LLM
from engine.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "server_overhead.json"
BATCH = 8
FOLLOWERS = 100
SETTLE_SECONDS = 2.0
"""for followers to read the newest lines, which are there before anything new"""
TARGETS = {"http_vs_llm": 0.9, "traced_vs_not": 0.99, "followed_vs_not": 0.99}


def prompts() -> list[list[int]]:
    return [[(7919 * i + 104_729 * n) % 48_000 + 50 for i in range(16)] for n in range(BATCH)]


async def stream(port: int, prompt: list[int], tokens: int) -> int:
    """Ask, and read to the end. Returns how many events came."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
    answer = b"".join([piece async for piece in reader])
    writer.close()
    usage = json.loads(answer.rpartition(b'"usage":')[2].partition(b"}}")[0] + b"}}")
    assert usage["completion_tokens"] == tokens, usage
    return answer.count(b"data: ")


async def all_streams(port: int, tokens: int) -> None:
    await asyncio.gather(*(stream(port, prompt, tokens) for prompt in prompts()))


async def follow(port: int, begun: asyncio.Semaphore) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /debug/alloc HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
    await reader.read(1)
    begun.release()
    while await reader.read(1 << 16):
        pass


async def with_followers(port: int, tokens: int, timed: Callable[[float], None]) -> None:
    begun = asyncio.Semaphore(0)
    followers = [asyncio.create_task(follow(port, begun)) for _ in range(FOLLOWERS)]
    for _ in followers:
        await begun.acquire()
    await asyncio.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    await all_streams(port, tokens)
    timed(time.perf_counter() - begin)
    for follower in followers:
        follower.cancel()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    common: dict[str, Any] = {"kv_cache_memory": 64 << 20, "max_num_seqs": BATCH, "max_model_len": 1024}
    flags = [arguments.model, "--kv-cache-memory", "64MiB", "--max-num-seqs", str(BATCH)]
    flags += ["--max-model-len", "1024", "--no-enable-prefix-caching"]
    seconds: dict[str, list[float]] = {name: [] for name in ("llm", "http", "traced", "followed")}
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    llm = LLM(arguments.model, enable_prefix_caching=False, **common)
    with llm, Server(*flags) as plain, Server(*flags, "--alloc-trace") as traced:
        plain_port, traced_port = (int(server.url.rpartition(":")[2]) for server in (plain, traced))

        def through_llm() -> None:
            begin = time.perf_counter()
            llm.generate(prompts(), params)
            seconds["llm"].append(time.perf_counter() - begin)

        def through(name: str, port: int) -> None:
            begin = time.perf_counter()
            asyncio.run(all_streams(port, arguments.tokens))
            seconds[name].append(time.perf_counter() - begin)

        turns: list[Callable[[], None]] = [
            through_llm,
            lambda: through("http", plain_port),
            lambda: through("traced", traced_port),
            lambda: asyncio.run(with_followers(traced_port, arguments.tokens, seconds["followed"].append)),
        ]
        for turn in turns:
            turn()
        for times in seconds.values():
            times.clear()
        for round_ in range(arguments.rounds):
            for turn in turns[round_ % len(turns) :] + turns[: round_ % len(turns)]:
                turn()
    count = BATCH * arguments.tokens
    ratios = {
        "http_vs_llm": ratio(seconds["llm"], seconds["http"]),
        "traced_vs_not": ratio(seconds["http"], seconds["traced"]),
        "followed_vs_not": ratio(seconds["traced"], seconds["followed"]),
    }
    return {
        "cores": os.cpu_count(),
        "batch": BATCH,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "tokens_per_second": {name: count / statistics.median(times) for name, times in seconds.items()},
        "ratios": ratios,
        "met": {name: ratios[name] >= target for name, target in TARGETS.items()},
        "seconds": seconds,
    }


def ratio(before: list[float], after: list[float]) -> float:
    """Median of the rounds' ratios: the rounds lie beside each other in time."""
    return statistics.median(one / other for one, other in zip(before, after, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    result = measure(parser.parse_args())
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:12} {rate:8.1f} tokens/s")
    for name, value in result["ratios"].items():
        print(f"{name:16} {value:.3f}  target {TARGETS[name]}  {'ok' if result['met'][name] else 'MISSED'}")
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
