"""What a decode step costs on the host, where the device takes no time at all.

Everything that the engine does between two steps is here: scheduling, the step's inputs, the sampling
parameters as the CUDA backend packs them, the requests' updates, and text out of tokens. The model and the
device are not: a step's tokens are given at once. On a GPU these microseconds are the gap between two steps.
Prints a table and writes benchmarks/results/host_step.json: microseconds at the median over the steps, of
the step and of the text, which the HTTP server makes in another process; and with a device that takes 5 ms a
step, how long it has nothing to do between two, while text is made beside it.

    python benchmarks/host_step.py [--checkpoint DIRECTORY] [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend.cuda.sampling import on_device, pack_rows, row_bytes
from engine.backend.protocol import StepBatch
from engine.block_pool import BlockPool
from engine.config import EngineConfig, EngineLimits
from engine.core import EngineCore
from engine.failure import FailureReporter
from engine.kv_cache import KVCacheManager
from engine.messages import AddRequest
from engine.model.tokenizer import Tokenizer
from engine.output_processor import OutputProcessor
from engine.runner import ModelRunner
from engine.sampler import PendingTokens, SampledTokens, SamplingRow
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

RESULT = Path(__file__).parent / "results" / "host_step.json"
CHECKPOINT = Path(__file__).parents[1] / "tests" / "data" / "checkpoints" / "qwen2" / "NVFP4-modelopt"
BATCHES = (1, 8, 32, 128, 256)
PROMPT_TOKENS = 128
MAX_MODEL_LEN = 4096
VOCABULARY = 500
"""tokens to draw from; every tokenizer has more"""
DEVICE_SECONDS = 0.005
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=None, ignore_eos=True)


class ModelDevice:
    """A backend and a model that take a given time: the tokens that a step chooses are drawn beforehand."""

    def __init__(self, seconds: float) -> None:
        self.runs_ahead = seconds > 0
        self.idle = 0.0
        """seconds in which there was nothing to do"""
        self._seconds = seconds
        self._done = time.perf_counter()
        self._tokens = np.random.default_rng(0).integers(0, VOCABULARY, (64, 256), dtype=np.int32)
        self._step = 0
        self._table = memoryview(bytearray(row_bytes(256)))

    def prepare(self, batch: StepBatch) -> StepBatch:
        return batch

    def run(self, forward: Callable[[StepBatch], None], inputs: StepBatch) -> None:
        return forward(inputs)

    def forward(self, inputs: StepBatch, kv: Sequence[Any]) -> None:
        now = time.perf_counter()
        self.idle += now - self._done
        self._done = now + self._seconds

    def sample(self, logits: None, rows: Sequence[SamplingRow]) -> PendingTokens:
        indices = [index for index, row in enumerate(rows) if on_device(row)]
        assert len(indices) == len(rows)
        pack_rows(rows, indices, out=self._table)
        self._step += 1
        chosen = SampledTokens(self._tokens[self._step % 64, : len(rows)].copy(), [None] * len(rows))
        return PendingUntil(self._done, chosen)


class PendingUntil:
    """Tokens that are chosen at a moment."""

    def __init__(self, done: float, tokens: SampledTokens) -> None:
        self._done, self._tokens = done, tokens

    def wait(self) -> SampledTokens:
        # Sleeping would end late by more than what is measured.
        while time.perf_counter() < self._done:
            pass
        return self._tokens


class Engine:
    """The engine core over such a device, and text out of its tokens."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, batch: int, seconds: float) -> None:
        limits = EngineLimits(
            max_num_seqs=batch,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=batch * PROMPT_TOKENS,
            block_size=16,
            max_logits_rows=batch,
            vocab_size=VOCABULARY,
        )
        pool = BlockPool(batch * MAX_MODEL_LEN // 16)
        self.device = ModelDevice(seconds)
        device: Any = self.device
        self.core = EngineCore(
            limits,
            Scheduler(limits, KVCacheManager(pool, 16, prefix_caching=True)),
            ModelRunner(device, device, [], limits),
            eos_token_ids=[],
            failures=FailureReporter(directory, EngineConfig(model="instant"), output=sys.stderr),
            seed=0,
        )
        self.processor = OutputProcessor(tokenizer)

    def fill(self, batch: int, params: SamplingParams) -> None:
        prompts = np.random.default_rng(1).integers(0, VOCABULARY, (batch, PROMPT_TOKENS))
        for index, prompt in enumerate(prompts.tolist()):
            request = AddRequest(request_id=f"r{index}", prompt_token_ids=prompt, params=params)
            for message in self.processor.add(request):
                self.core.add_request(message)

    def step(self, expected: int) -> tuple[float, float]:
        """Seconds of the step, and of its text."""
        begin = time.perf_counter()
        updates = self.core.step().updates
        middle = time.perf_counter()
        deltas = self.processor.process(updates).deltas
        end = time.perf_counter()
        assert len(deltas) == expected
        return middle - begin, end - middle

    def idle_in(self, steps: int, expected: int) -> float:
        """Seconds a step in which the device has nothing to do; text is made while it computes."""
        self.core.launch()
        self.device.idle = 0.0
        for _ in range(steps):
            updates = self.core.collect().updates
            self.core.launch()
            assert len(self.processor.process(updates).deltas) == expected
        self.core.settle()
        return self.device.idle / steps


def measure(directory: Path, tokenizer: Tokenizer, batch: int, steps: int) -> dict[str, float]:
    """Microseconds at the median: of the step, of its text, and those in which a device waits."""
    engine = Engine(directory, tokenizer, batch, 0.0)
    engine.fill(batch, SAMPLED)
    engine.step(batch)
    times = [engine.step(batch) for _ in range(steps)][steps // 10 :]
    step, text = (statistics.median(part) for part in zip(*times, strict=True))
    engine = Engine(directory, tokenizer, batch, DEVICE_SECONDS)
    engine.fill(batch, SAMPLED)
    engine.step(batch)
    idle = statistics.median(engine.idle_in(10, batch) for _ in range(steps // 10))
    return {"step_us": step * 1e6, "text_us": text * 1e6, "device_idle_us": idle * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="whose tokenizer makes the text")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    tokenizer = Tokenizer.open(options.checkpoint)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in BATCHES:
            found = measure(Path(folder), tokenizer, batch, options.steps)
            rows.append({"sequences": batch} | {name: round(value, 1) for name, value in found.items()})
            print(rows[-1])
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    RESULT.write_text(json.dumps({**machine, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
