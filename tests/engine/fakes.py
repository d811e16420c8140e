"""A model small enough to predict: its logits are a hash of everything that it reads back from its KV cache.

A wrong block table, slot, position or prefix hit changes what is read back, and with it every token after.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.core import MemoryResource

from engine import sampler
from engine.backend.protocol import DType, KVLayer, StepBatch, StepInputs, Tensor
from engine.block_pool import BlockPool
from engine.config import EngineConfig, EngineLimits
from engine.core import EngineCore
from engine.failure import FailureReporter
from engine.kv_cache import AttentionStateSpec, KVCache, KVCacheManager
from engine.memory.resources import HostMemoryResource
from engine.messages import AddRequest, FinishReason, RequestUpdate
from engine.runner import ModelRunner
from engine.sampler import PendingTokens, SampledTokens, SamplingRow
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

VOCABULARY = 97
EOS = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@dataclass(slots=True, eq=False)
class ArrayTensor(Tensor):
    array: np.ndarray


class FakeBackend:
    """Allocates and samples; what a model computes is the fake model's business."""

    name = "cpu"
    activation_dtype = DType.FLOAT32
    runs_ahead = False

    def __init__(self, memory: MemoryResource) -> None:
        self.memory = memory

    def empty(self, shape: tuple[int, ...], dtype: DType) -> ArrayTensor:
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = self.memory.allocate(size)
        raw = (ctypes.c_uint8 * size).from_address(int(buffer.handle))
        array = np.frombuffer(raw, dtype.carrier).reshape(shape)
        array.view(np.uint8)[:] = 0xFF
        return ArrayTensor(buffer, shape, dtype, array)

    def prepare(self, batch: StepBatch) -> StepInputs:
        nothing: Any = None
        return StepInputs(batch, *[nothing] * 7)

    def run(self, forward: Callable[[StepInputs], Any], inputs: StepInputs) -> Any:
        return forward(inputs)

    def sample(self, logits: Any, rows: Sequence[SamplingRow]) -> PendingTokens:
        return LateTokens(logits, rows) if self.runs_ahead else sampler.sample(logits, rows)


class LateTokens:
    """Tokens that are chosen when somebody waits for them."""

    def __init__(self, logits: Any, rows: Sequence[SamplingRow]) -> None:
        self._logits, self._rows = logits, rows

    def wait(self) -> SampledTokens:
        return sampler.sample(self._logits, self._rows)


class FakeModel:
    """Stores each token's id as its key, reads the whole sequence back, and hashes it into logits."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.before_step: Callable[[StepBatch], None] = lambda batch: None
        self.steps = 0
        self.computed_tokens = 0
        self.num_seqs: list[int] = []

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> Any:
        batch, limits = inputs.host, self.limits
        self.steps += 1
        self.computed_tokens += len(batch.token_ids)
        self.num_seqs.append(len(batch.seq_lens))
        assert 0 < len(batch.token_ids) <= limits.max_num_batched_tokens
        assert len(batch.seq_lens) <= limits.max_num_seqs
        assert len(batch.logits_rows) <= limits.max_logits_rows
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping)
        assert batch.slot_mapping.dtype == np.int64
        self.before_step(batch)

        keys = kv[0].key.array.reshape(-1, 4)  # type: ignore[attr-defined]
        keys[batch.slot_mapping] = batch.token_ids.astype("<i4").view(np.uint8).reshape(-1, 4)
        block_size = kv[0].block_size
        logits = np.empty((len(batch.logits_rows), VOCABULARY), np.float32)
        for r, t in enumerate(batch.logits_rows):
            s = int(np.searchsorted(batch.query_start, t, side="right")) - 1
            length = int(batch.positions[t]) + 1
            assert length <= batch.seq_lens[s]
            where = np.arange(length)
            slots = batch.block_tables[s, where // block_size].astype(np.int64) * block_size
            slots += where % block_size
            logits[r] = logits_after(keys[slots].reshape(-1).view("<i4"))
        return logits


def logits_after(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """float32 [VOCABULARY]: the logits that follow `tokens`."""
    data = np.asarray(tokens, "<i4").tobytes()
    key = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return np.random.Generator(np.random.Philox(key)).normal(size=VOCABULARY).astype(np.float32)


def expected_greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What a right engine generates, end of sequence ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class FakeEngine:
    """An engine core over the fake model, and everything beside it that a test may look at."""

    core: EngineCore
    model: FakeModel
    pool: BlockPool
    memory: HostMemoryResource
    stderr: io.StringIO
    failures: FailureReporter

    def run(self, *messages: AddRequest, most_steps: int = 2000) -> dict[str, list[RequestUpdate]]:
        """Add requests and step until all have ended. Updates by request."""
        for message in messages:
            self.core.add_request(message)
        updates: dict[str, list[RequestUpdate]] = {}
        for _ in range(most_steps):
            if not self.core.has_unfinished_requests:
                return updates
            for update in self.core.step().updates:
                updates.setdefault(update.request_id, []).append(update)
        raise AssertionError(f"requests are unfinished after {most_steps} steps")


def limits_of(**fields: int) -> EngineLimits:
    standard = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "vocab_size": VOCABULARY,
    }
    merged = {**standard, **fields}
    merged.setdefault("max_logits_rows", merged["max_num_seqs"])
    return EngineLimits(**merged)


def make_engine(
    directory: Path,
    *,
    num_blocks: int = 64,
    prefix_caching: bool = True,
    policy: Any = "fcfs",
    seed: int | None = 0,
    record_prompts: bool = False,
    **limit_fields: int,
) -> FakeEngine:
    limits = limits_of(**limit_fields)
    memory = HostMemoryResource(1 << 24)
    backend: Any = FakeBackend(memory)
    spec = AttentionStateSpec("model.layers.0", 1, 4, DType.FLOAT8_E4M3)
    cache = KVCache([spec], num_blocks, limits.block_size)
    cache.allocate(backend)
    pool = BlockPool(num_blocks)
    manager = KVCacheManager(pool, limits.block_size, prefix_caching=prefix_caching)
    model = FakeModel(limits)
    stderr = io.StringIO()
    config = EngineConfig(model="fake", record_prompts=record_prompts)
    failures = FailureReporter(directory, config, output=stderr)
    core = EngineCore(
        limits,
        Scheduler(limits, manager, policy),
        ModelRunner(model, backend, cache.layers, limits),
        eos_token_ids=[EOS],
        failures=failures,
        seed=seed,
    )
    return FakeEngine(core, model, pool, memory, stderr, failures)


def request(
    name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, priority: int = 0
) -> AddRequest:
    return AddRequest(request_id=name, prompt_token_ids=list(prompt), params=params, priority=priority)


def tokens_of(updates: Sequence[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.new_token_ids]


def ended(updates: Sequence[RequestUpdate]) -> FinishReason | None:
    return updates[-1].finish_reason
