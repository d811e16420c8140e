"""A step's inputs on the device: packed into one pinned buffer, sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.backend.cuda.attention import AttentionPlan
from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.graphs import DecodeBucket, padded
from engine.backend.cuda.staging import PinnedBuffer
from engine.backend.cuda.tensor import CudaTensor, aligned
from engine.backend.protocol import DType, StepBatch, StepInputs, StepLimits

_TABLE_COLUMNS = 64
"""Block tables are sent in multiples of so many columns, as wide as the longest sequence needs."""
_PART_ALIGNMENT = 16


@dataclass(slots=True, eq=False)
class CudaStepInputs(StepInputs):
    """A step's inputs on the device, and what its attention must do."""

    attention: AttentionPlan
    bucket: DecodeBucket | None
    """what the step was padded to"""
    wanted_rows: int
    """rows of logits that the step is for; those of padding come after them"""


def io_bytes(limits: StepLimits) -> int:
    """Bytes of the largest step's inputs."""
    t, s = limits.max_tokens, limits.max_seqs
    parts = [
        4 * t,
        4 * t,
        8 * t,
        4 * (s + 1),
        4 * s,
        4 * limits.max_logits_rows,
        4 * s * limits.max_blocks_per_seq,
    ]
    return sum(aligned(part, _PART_ALIGNMENT) for part in parts)


class InputWriter:
    """Two pinned buffers in turn, so that a step's inputs may be written while the last ones are sent."""

    def __init__(
        self,
        device: CudaDevice,
        io: CudaTensor,
        pinned: tuple[PinnedBuffer, PinnedBuffer],
        limits: StepLimits,
    ) -> None:
        self._device = device
        self._io = io
        self._pinned = pinned
        self._limits = limits
        self._turn = 0

    def write(self, batch: StepBatch, bucket: DecodeBucket | None = None) -> CudaStepInputs:
        """Queue the copy of a step's inputs, padded to `bucket`, whose inputs always lie at one place.

        Raises
        ------
        ValueError
            If the step is larger than the limits.
        """
        self._check(batch)
        wanted_rows = len(batch.logits_rows)
        plan = AttentionPlan.of(batch)
        length = int(batch.seq_lens.max(initial=0))
        if bucket is not None:
            length = bucket.length
            plan = replace(plan, longest_decode=length)
        blocks = -(-length // self._limits.block_size)
        columns = min(max(aligned(blocks, _TABLE_COLUMNS), 1), batch.block_tables.shape[1])
        batch = replace(batch, block_tables=batch.block_tables[:, :columns])
        if bucket is not None:
            batch = padded(batch, bucket.sequences)
        self._turn ^= 1
        pinned = self._pinned[self._turn]
        pinned.wait()
        offset = 0

        def put(array: np.ndarray, dtype: DType) -> CudaTensor:
            nonlocal offset
            begin, end = offset, offset + array.size * dtype.itemsize
            pinned.array[begin:end].view(dtype.carrier).reshape(array.shape)[...] = array
            offset = aligned(end, _PART_ALIGNMENT)
            return CudaTensor.of(self._io.buffer, array.shape, dtype, begin)

        inputs = CudaStepInputs(
            host=batch,
            token_ids=put(batch.token_ids, DType.INT32),
            positions=put(batch.positions, DType.INT32),
            slot_mapping=put(batch.slot_mapping, DType.INT64),
            query_start=put(batch.query_start, DType.INT32),
            seq_lens=put(batch.seq_lens, DType.INT32),
            logits_rows=put(batch.logits_rows, DType.INT32),
            block_tables=put(batch.block_tables, DType.INT32),
            attention=plan,
            bucket=bucket,
            wanted_rows=wanted_rows,
        )
        self._device.copy_to_device(self._io.address, pinned.address, offset)
        pinned.mark()
        return inputs

    def _check(self, batch: StepBatch) -> None:
        limits = self._limits
        for what, found, most in (
            ("tokens", len(batch.token_ids), limits.max_tokens),
            ("sequences", len(batch.seq_lens), limits.max_seqs),
            ("rows of logits", len(batch.logits_rows), limits.max_logits_rows),
            ("blocks a sequence", batch.block_tables.shape[1], limits.max_blocks_per_seq),
        ):
            if found > most:
                raise ValueError(f"a step of {found} {what}, room was reserved for {most}")
