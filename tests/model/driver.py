"""Runs a model on a backend without the engine: steps that mix prompts and single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend.cpu import CpuBackend
from engine.backend.protocol import DType, KVLayer, StepBatch, StepLimits
from engine.memory.resources import HostMemoryResource
from engine.model.checkpoint import Checkpoint
from engine.model.llama import Llama
from engine.model.loader import WeightLoader
from engine.model.registry import model_class

BLOCK_SIZE = 16
LIMITS = StepLimits(
    max_tokens=256,
    max_seqs=8,
    max_blocks_per_seq=32,
    max_logits_rows=256,
    vocab_size=512,
    block_size=BLOCK_SIZE,
)
NUM_BLOCKS = 64


class Driver:
    """A checkpoint with a KV cache of `kv_dtype`, on the CPU backend if no other is given.

    The cache begins as NaN in every slot, so that one that is read before it is written shows in the logits.
    """

    def __init__(
        self,
        directory: Path,
        kv_dtype: DType,
        *,
        threads: int | None = None,
        memory: Any = None,
        backend: Any = None,
    ) -> None:
        self.memory = HostMemoryResource(1 << 28) if memory is None else memory
        self.backend = CpuBackend(self.memory, threads=threads) if backend is None else backend
        checkpoint = Checkpoint.open(directory)
        self.config = checkpoint.config
        loader = WeightLoader(checkpoint, self.config, self.backend)
        self.model: Llama = model_class(self.config.architecture)(self.config, loader, self.backend)
        self.model.reserve(LIMITS)
        self.backend.reserve(LIMITS)
        shape = (NUM_BLOCKS, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_dim)
        self.kv = []
        for layer in range(self.config.num_layers):
            key, value = (self.backend.empty(shape, kv_dtype) for _ in range(2))
            scales = loader.kv_scales(layer) if kv_dtype is DType.FLOAT8_E4M3 else (1.0, 1.0)
            self.kv.append(KVLayer(key, value, *scales))
        self.block_tables = np.empty((0, 0), np.int32)

    def run(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], chunk: int
    ) -> list[np.ndarray]:
        """Logits of every position, float32 [n, vocabulary] for each sequence.

        All run at once: a sequence takes up to `chunk` tokens of its prompt a step, then one at a time.
        """
        self._reset(sequences)
        done = [0] * len(sequences)
        logits: list[list[np.ndarray]] = [[] for _ in sequences]
        while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
            step = []
            for s, tokens in enumerate(sequences):
                left = prompt_lengths[s] - done[s]
                count = min(chunk, left) if left > 0 else min(1, len(tokens) - done[s])
                if count:
                    step.append((s, done[s], count))
            rows = self._step(sequences, step)
            for s, first, count in step:
                logits[s].append(rows[:count])
                rows = rows[count:]
                done[s] = first + count
        return [np.concatenate(rows) for rows in logits]

    def stored(self, layer: int, sequence: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values that are in the cache, in its carrier, [length, kv_heads, D]."""
        at = np.arange(length)
        blocks = self.block_tables[sequence, at // BLOCK_SIZE]
        cache = self.kv[layer]
        key, value = (
            self.backend.to_host(tensor)[blocks, at % BLOCK_SIZE] for tensor in (cache.key, cache.value)
        )
        return key, value

    def poison(self, tensor: Any) -> None:
        """Make all of `tensor` NaN: ones in every bit are, in every format of the cache."""
        tensor.array.view(np.uint8).fill(0xFF)

    def close(self) -> int:
        """Give everything back. Returns the bytes that are still live."""
        self.backend.close()
        del self.model
        self.kv.clear()
        return self.memory.live

    def _reset(self, sequences: Sequence[Sequence[int]]) -> None:
        for layer in self.kv:
            for tensor in (layer.key, layer.value):
                self.poison(tensor)
        order = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
        self.block_tables = np.full((len(sequences), LIMITS.max_blocks_per_seq), -1, np.int32)
        for s, tokens in enumerate(sequences):
            count = -(-len(tokens) // BLOCK_SIZE)
            self.block_tables[s, :count], order = order[:count], order[count:]

    def _step(self, sequences: Sequence[Sequence[int]], step: Sequence[tuple[int, int, int]]) -> np.ndarray:
        counts = [count for _, _, count in step]
        index = np.array([s for s, _, _ in step])
        positions = np.concatenate([np.arange(first, first + count) for _, first, count in step])
        blocks = self.block_tables[np.repeat(index, counts), positions // BLOCK_SIZE]
        batch = StepBatch(
            token_ids=np.concatenate(
                [sequences[s][first : first + count] for s, first, count in step]
            ).astype(np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seq_lens=np.array([first + count for _, first, count in step], np.int32),
            block_tables=self.block_tables[index],
            logits_rows=np.arange(len(positions), dtype=np.int32),
        )
        return self.backend.to_host(self.model.forward(self.backend.prepare(batch), self.kv))
