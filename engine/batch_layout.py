"""One step's inputs on the host, laid out as the backend reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backend.protocol import StepBatch
from engine.config import EngineLimits
from engine.scheduler import ScheduledRequest

__all__ = ["BatchLayout"]

_NO_TABLE = np.empty(0, np.int32)


class BatchLayout:
    """Preallocated host arrays of the largest step; `fill` returns views of their beginnings.

    While a step is laid out the device has nothing to do, so what the last step left is not written again: a
    sequence that has kept its row only adds the blocks that it got since.
    """

    def __init__(self, limits: EngineLimits) -> None:
        tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self._block_size = limits.block_size
        self._count = np.arange(max(tokens, limits.max_logits_rows), dtype=np.int32)
        self._token_ids = np.empty(tokens, np.int32)
        self._slots = np.empty(tokens, np.int64)
        self._query_start = np.zeros(seqs + 1, np.int32)
        self._block_tables = np.zeros((seqs, limits.max_blocks_per_seq), np.int32)
        self._tables = [_NO_TABLE] * seqs
        """whose blocks each row of `_block_tables` has, and"""
        self._held = [0] * seqs
        """how many of them"""

    def fill(self, scheduled: Sequence[ScheduledRequest]) -> StepBatch:
        """The batch's inputs. Valid until the next call."""
        num_seqs = len(scheduled)
        starts = np.fromiter([item.start for item in scheduled], np.int32, num_seqs)
        counts = np.fromiter([item.num_tokens for item in scheduled], np.int32, num_seqs)
        logits_starts = np.fromiter([item.logits_start for item in scheduled], np.int32, num_seqs)
        query_start = self._query_start[: num_seqs + 1]
        np.cumsum(counts, out=query_start[1:])
        t = int(query_start[-1])
        token_ids = self._token_ids[:t]
        if t == num_seqs:
            token_ids[:] = [item.request.tokens[item.start] for item in scheduled]
        else:
            for item, begin in zip(scheduled, query_start.tolist(), strict=False):
                token_ids[begin : begin + item.num_tokens] = item.request.tokens[item.start : item.end]
        for row, item in enumerate(scheduled):
            self._place_blocks(row, item)
        seq_lens = starts + counts
        positions = _ranges(starts, counts, self._count)
        sequence = self._count[:t] if t == num_seqs else np.repeat(self._count[:num_seqs], counts)
        block, offset = np.divmod(positions, np.int32(self._block_size))
        slots = self._slots[:t]
        slots[:] = self._block_tables[sequence, block]
        slots *= self._block_size
        slots += offset
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=self._block_tables[:num_seqs],
            logits_rows=_ranges(
                query_start[:-1] + logits_starts - starts,
                np.maximum(seq_lens - logits_starts, 0),  # reported already, where it begins behind the end
                self._count,
            ),
        )

    def _place_blocks(self, row: int, item: ScheduledRequest) -> None:
        """Bring a row of the block tables up to date."""
        # A sequence that is admitted again has a new table: the same one has only grown.
        table, held = item.request.block_table, item.request.num_blocks
        if self._tables[row] is not table:
            self._tables[row], self._held[row] = table, 0
        have = self._held[row]
        if have != held:
            self._block_tables[row, have:held] = table[have:held]
            self._held[row] = held


def _ranges(starts: np.ndarray, counts: np.ndarray, count: np.ndarray) -> np.ndarray:
    """int32: ``starts[i], starts[i] + 1, …``, `counts[i]` of them, for each i. `count` is 0, 1, 2, …"""
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    if total == len(counts) and (counts == 1).all():
        return starts
    steps: np.ndarray = count[:total] + np.repeat(starts - (ends - counts), counts)
    return steps
