"""Decode steps as CUDA graphs: captured once for a bucket of shapes, then launched whole.

A decode step of a small model is hundreds of kernels of a few microseconds. Launched one by one, the device
waits for the host; as one graph they follow each other without it. What is captured are shapes and
addresses, so steps are padded up to few sizes, and a step's inputs lie at the same place for each of them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.backend.cuda.device import CudaDevice, is_out_of_memory
from engine.backend.protocol import StepBatch, StepInputs, StepLimits, Tensor
from engine.errors import DeviceError

if TYPE_CHECKING:
    from cuda.core.graph import Graph

__all__ = ["DecodeBucket", "StepGraphs", "bucket_sizes", "padded"]

_log = logging.getLogger(__name__)

Forward = Callable[[StepInputs], Tensor]

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SIZE_STEP = 64
"""between sizes from there on"""
_LENGTHS = tuple(1024 << shift for shift in range(0, 32, 2))
"""Longest sequences of a bucket. They decide into how many parts attention splits a sequence; each is split
by its own length, so one that is shorter than its bucket only has smaller parts."""
_PADDING_SLOT = -1
"""rope_and_store_kv stores nothing there"""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Steps that run as one graph: each of up to so many sequences computes one token."""

    sequences: int
    length: int
    """tokens of the longest sequence"""


def bucket_sizes(limit: int) -> list[int]:
    """Numbers of sequences that steps of up to `limit` are padded to, ascending; the last is `limit`."""
    larger = range(_SIZES[-1] + _SIZE_STEP, limit, _SIZE_STEP)
    return [size for size in (*_SIZES, *larger) if size < limit] + [limit]


def padded(batch: StepBatch, sequences: int) -> StepBatch:
    """The decode step with as many sequences as `sequences`.

    Those added are of one token, which reads the first slot of the cache and stores nothing.
    """
    added = sequences - len(batch.seq_lens)
    if added == 0:
        return batch
    count = np.arange(len(batch.token_ids), sequences, dtype=np.int32)
    tables = np.zeros((added, batch.block_tables.shape[1]), np.int32)
    return StepBatch(
        token_ids=_extended(batch.token_ids, added, 0),
        positions=_extended(batch.positions, added, 0),
        slot_mapping=_extended(batch.slot_mapping, added, _PADDING_SLOT),
        query_start=np.concatenate([batch.query_start, count + np.int32(1)]),
        seq_lens=_extended(batch.seq_lens, added, 1),
        block_tables=np.concatenate([batch.block_tables, tables]),
        logits_rows=np.concatenate([batch.logits_rows, count]),
    )


def _extended(array: np.ndarray, added: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(added, value, array.dtype)])


class StepGraphs:
    """The graphs of one model's decode steps.

    A bucket's first step runs kernel by kernel, which brings its kernels to the device, its second one is
    captured. What a graph takes of the device's memory is counted as the libraries'. Where there is none
    left for graphs, steps run kernel by kernel from then on.

    Parameters
    ----------
    enabled
        Whether to capture at all.
    """

    def __init__(self, device: CudaDevice, *, enabled: bool) -> None:
        self._device = device
        self.enabled = enabled
        """decode steps are captured and launched whole"""
        self._sizes: list[int] = []
        self._longest = 0
        self._forward: Forward | None = None
        self._seen: set[DecodeBucket] = set()
        self._graphs: dict[DecodeBucket, tuple[Graph, Tensor]] = {}

    @property
    def count(self) -> int:
        """Graphs that are held."""
        return len(self._graphs)

    def reserve(self, limits: StepLimits) -> None:
        """Steps will be within `limits`."""
        self._sizes = bucket_sizes(min(limits.max_seqs, limits.max_tokens, limits.max_logits_rows))
        self._longest = limits.max_blocks_per_seq * limits.block_size

    def bucket_of(self, batch: StepBatch) -> DecodeBucket | None:
        """Where the step belongs; None if it must run kernel by kernel."""
        sequences = len(batch.seq_lens)
        if not self.enabled or not len(batch.token_ids) == len(batch.logits_rows) == sequences > 0:
            return None
        # As many tokens as sequences, each of which has one at least.
        place = bisect_left(self._sizes, sequences)
        length = _LENGTHS[bisect_left(_LENGTHS, int(batch.seq_lens.max()))]
        return DecodeBucket(self._sizes[place], min(length, self._longest))

    def run(self, forward: Forward, inputs: StepInputs, bucket: DecodeBucket | None) -> Tensor:
        """What `forward` returns for `inputs`, which are padded to `bucket` and lie where all of it do."""
        if bucket is None or not self.enabled:
            return forward(inputs)
        if forward is not self._forward:
            self.close()
            self._forward = forward
        captured = self._graphs.get(bucket)
        if captured is None and bucket in self._seen:
            captured = self._capture(forward, inputs, bucket)
        if captured is None:
            self._seen.add(bucket)
            return forward(inputs)
        graph, output = captured
        self._device.launch_graph(graph)
        return output

    def _capture(
        self, forward: Forward, inputs: StepInputs, bucket: DecodeBucket
    ) -> tuple[Graph, Tensor] | None:
        try:
            captured = self._device.capture(lambda: forward(inputs))
        except DeviceError as error:
            if not is_out_of_memory(error):
                raise
            self.enabled = False
            _log.warning(
                "no memory for the graph of a step of %d sequences: steps run kernel by kernel from here on "
                "(a smaller --gpu-memory-utilization leaves room for graphs)",
                bucket.sequences,
            )
            self.close()
            return None
        self._graphs[bucket] = captured
        return captured

    def close(self) -> None:
        """Let go of all graphs. Idempotent."""
        if self._graphs:
            self._device.close_graphs([graph for graph, _ in self._graphs.values()])
        self._graphs.clear()
        self._seen.clear()
        self._forward = None
