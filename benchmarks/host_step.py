"""What a decode step costs on the host, where the device takes no time at all.

Everything that the engine does between two steps is here: scheduling, the step's inputs, the sampling
parameters as the CUDA backend packs them, the requests' updates, and text out of tokens. The model and the
device are not: a step's tokens are given at once. On a GPU these microseconds are the gap between two steps.
Prints a table and writes benchmarks/results/host_step.json: microseconds at the median over the steps, of
the step and of the text, which the HTTP server makes in another process.

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
from engine.sampler import SampledTokens, SamplingRow
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

RESULT = Path(__file__).parent / "results" / "host_step.json"
CHECKPOINT = Path(__file__).parents[1] / "tests" / "data" / "checkpoints" / "qwen2" / "NVFP4-modelopt"
BATCHES = (1, 8, 32, 128, 256)
PROMPT_TOKENS = 128
MAX_MODEL_LEN = 4096
VOCABULARY = 500
"""tokens to draw from; every tokenizer has more"""
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=None, ignore_eos=True)


class InstantDevice:
    """A backend and a model that take no time: the tokens that a step chooses are drawn beforehand."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0).integers(0, VOCABULARY, (64, 256), dtype=np.int32)
        self._step = 0
        self._table = memoryview(bytearray(row_bytes(256)))

    def prepare(self, batch: StepBatch) -> StepBatch:
        return batch

    def run(self, forward: Callable[[StepBatch], None], inputs: StepBatch) -> None:
        return forward(inputs)

    def forward(self, inputs: StepBatch, kv: Sequence[Any]) -> None:
        return None

    def sample(self, logits: None, rows: Sequence[SamplingRow]) -> SampledTokens:
        indices = [index for index, row in enumerate(rows) if on_device(row)]
        assert len(indices) == len(rows)
        pack_rows(rows, indices, out=self._table)
        self._step += 1
        return SampledTokens(self._tokens[self._step % 64, : len(rows)].copy(), [None] * len(rows))


class Engine:
    """The engine core over the instant device, and text out of its tokens."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, batch: int) -> None:
        limits = EngineLimits(
            max_num_seqs=batch,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=batch * PROMPT_TOKENS,
            block_size=16,
            max_logits_rows=batch,
            vocab_size=VOCABULARY,
        )
        pool = BlockPool(batch * MAX_MODEL_LEN // 16)
        device: Any = InstantDevice()
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


def measure(
    directory: Path, tokenizer: Tokenizer, batch: int, params: SamplingParams, steps: int
) -> tuple[float, float]:
    """Microseconds of the step, and of its text, at the median."""
    engine = Engine(directory, tokenizer, batch)
    engine.fill(batch, params)
    engine.step(batch)
    times = [engine.step(batch) for _ in range(steps)][steps // 10 :]
    core, text = (statistics.median(part) * 1e6 for part in zip(*times, strict=True))
    return core, text


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
            core, text = measure(Path(folder), tokenizer, batch, SAMPLED, options.steps)
            rows.append({"sequences": batch, "step_us": round(core, 1), "text_us": round(text, 1)})
            print(f"{batch:4d} sequences: {core:8.1f} us the step, {text:8.1f} us its text")
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    RESULT.write_text(json.dumps({**machine, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
