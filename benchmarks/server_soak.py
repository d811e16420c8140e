"""Two hundred streaming clients, some of which go away, and an engine that is killed three times.

For ``--seconds`` clients ask for completions of random lengths; one in five leaves after some tokens. Then
the engine is killed with SIGKILL three times while they go on. Counted is what must be zero: requests without
an answer (a finish reason, or an error that says why), blocks still held at the end, processes left behind.
And resident memory, of the server and of its first engine, from the second quarter of the quiet part to the
last: in the first the engine's KV cache is touched for the first time. Prints a table and writes
``benchmarks/results/server_soak.json``.

    python benchmarks/server_soak.py --model path/to/checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx
from server_process import Server

RESULTS = Path(__file__).parent / "results" / "server_soak.json"
KILLS = 3
SECONDS_AFTER_A_KILL = 8.0


async def one_request(client: httpx.AsyncClient, random_: random.Random) -> str:
    """Ask once. Returns what became of it."""
    leaves_after = random_.randrange(1, 12) if random_.random() < 0.2 else None
    body = {
        "prompt": [random_.randrange(100, 40_000) for _ in range(random_.randrange(4, 64))],
        "max_tokens": random_.randrange(8, 48),
        "ignore_eos": True,
        "stream": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                return f"status {response.status_code}" if error["message"] else "no answer"
            count = 0
            ended = "no answer"
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return ended
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    ended = "error event" if chunk["error"].get("failure_id") else "error without a record"
                elif chunk["choices"] and chunk["choices"][0]["finish_reason"]:
                    ended = "finished"
                count += 1
                if count == leaves_after:
                    return "left"
            return "no answer"
    except httpx.TransportError as error:
        return f"no answer ({type(error).__name__})"


async def soak(server: Server, clients: int, seconds: float) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    samples: list[int] = []
    engine_samples: list[int] = []
    going = True
    current = outcomes

    async def client(number: int) -> None:
        random_ = random.Random(number)
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            while going:
                outcome = await one_request(http, random_)
                current[outcome] += 1
                if outcome.startswith("status"):
                    await anyio.sleep(0.25)

    async with anyio.create_task_group() as tasks:
        for number in range(clients):
            tasks.start_soon(client, number)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await anyio.sleep(1)
            samples.append(server.resident(server.pid))
            engine_samples.append(server.resident(server.engines()[0]))
        current = killed
        for _ in range(KILLS):
            os.kill(server.engines()[0], signal.SIGKILL)
            await anyio.sleep(SECONDS_AFTER_A_KILL)
        going = False
    quarter = max(len(samples) // 4, 1)
    return {
        "clients": clients,
        "seconds": seconds,
        "outcomes": dict(outcomes),
        "outcomes_with_kills": dict(killed),
        "without_an_answer": sum(
            count for name, count in (outcomes + killed).items() if name.startswith(("no answer", "error w"))
        ),
        "server_rss": [_mean(samples[quarter : 2 * quarter]), _mean(samples[-quarter:])],
        "engine_rss": [_mean(engine_samples[quarter : 2 * quarter]), _mean(engine_samples[-quarter:])],
    }


def _mean(values: list[int]) -> int:
    return sum(values) // len(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint; the demo model without it")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    flags = [arguments.model] if arguments.model else []
    flags += ["--kv-cache-memory", "64MiB", "--max-engine-restarts", str(KILLS), "--alloc-trace"]
    with Server(*flags) as server:
        result = anyio.run(soak, server, arguments.clients, arguments.seconds)
        server.wait_ready()
        # The figures are those of the last step: one more request makes one.
        body = {"prompt": [500], "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        result["blocks_held"] = server.metric("vllm:kv_cache_usage_perc")
        result["running"] = server.metric("vllm:num_requests_running")
        result["restarts"] = server.metric("vtserve_engine_restarts_total")
        engines = server.engines()
        result["engines"] = len(engines)
    result["processes_left"] = sum(Path(f"/proc/{pid}").exists() for pid in (server.pid, *engines))
    for name in ("server_rss", "engine_rss"):
        before, after = result[name]
        result[f"{name}_ratio"] = after / before
    checks = {
        "without_an_answer": result["without_an_answer"] == 0,
        "blocks_held": result["blocks_held"] == 0,
        "processes_left": result["processes_left"] == 0,
        "restarts": result["restarts"] == KILLS,
        "server_rss_ratio": result["server_rss_ratio"] <= 1.05,
        "engine_rss_ratio": result["engine_rss_ratio"] <= 1.05,
    }
    for name, value in result.items():
        verdict = {True: "ok", False: "MISSED"}.get(checks.get(name), "")  # type: ignore[arg-type]
        print(f"{name:24} {value}  {verdict}")
    RESULTS.write_text(json.dumps({"result": result, "checks": checks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
