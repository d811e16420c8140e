"""A step's inputs in io memory, checked, and sorted into what attention does with them.

Compiled kernels index without looking: what could lead them out of an array is found here, before they run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from engine.backend.cpu.jit import kernel
from engine.backend.cpu.layout import InputTensors
from engine.backend.cpu.tensor import HostTensor
from engine.backend.protocol import StepBatch, StepInputs, StepLimits
from engine.errors import EngineError

__all__ = ["HostStepInputs", "InputWriter"]

_PREFILL_FROM = 4
"""A sequence with this many tokens in a step is attended to in tiles, one with fewer token by token."""


@dataclass(slots=True, eq=False)
class HostStepInputs(StepInputs):
    """A step's inputs, and the parts of its attention."""

    block_size: int
    highest_block: int
    """the largest block that the step reads or writes; -1 if none"""
    decode_tokens: np.ndarray
    """int32 [n]: tokens that are attended to one by one"""
    decode_sequences: np.ndarray
    """int32 [n]: the sequence of each"""
    decode_context: int
    """positions that they see, all together"""
    prefill_sequences: np.ndarray
    """int32 [m]: sequences that are attended to in tiles"""


class InputWriter:
    """io memory for the largest step.

    Parameters
    ----------
    limits
        The largest step.
    tensors
        Memory for it.
    """

    def __init__(self, limits: StepLimits, tensors: InputTensors[HostTensor]) -> None:
        self._limits = limits
        for field in fields(tensors):
            getattr(tensors, field.name).array.fill(0)
        self._token_ids = tensors.token_ids
        self._positions = tensors.positions
        self._slot_mapping = tensors.slot_mapping
        self._query_start = tensors.query_start
        self._seq_lens = tensors.seq_lens
        self._block_tables = tensors.block_tables
        self._logits_rows = tensors.logits_rows
        self._decode_tokens = tensors.decode_tokens.array
        self._decode_sequences = tensors.decode_sequences.array
        self._prefill_sequences = tensors.prefill_sequences.array
        self._found = np.empty(_FOUND, np.int64)

    def write(self, batch: StepBatch) -> HostStepInputs:
        """Copy `batch` to io memory.

        Raises
        ------
        EngineError
            The step is larger than the limits, or something in it points outside of what it is about.
        """
        limits = self._limits
        num_tokens, num_seqs, num_rows = len(batch.token_ids), len(batch.seq_lens), len(batch.logits_rows)
        width = batch.block_tables.shape[1]
        for name, count, limit in (
            ("tokens", num_tokens, limits.max_tokens),
            ("sequences", num_seqs, limits.max_seqs),
            ("rows of logits", num_rows, limits.max_logits_rows),
            ("blocks of a sequence", width, limits.max_blocks_per_seq),
        ):
            if count > limit:
                raise EngineError(f"step of {count} {name}: expected at most {limit}")
        inputs = HostStepInputs(
            host=batch,
            token_ids=_filled(self._token_ids, batch.token_ids, num_tokens),
            positions=_filled(self._positions, batch.positions, num_tokens),
            slot_mapping=_filled(self._slot_mapping, batch.slot_mapping, num_tokens),
            query_start=_filled(self._query_start, batch.query_start, num_seqs + 1),
            seq_lens=_filled(self._seq_lens, batch.seq_lens, num_seqs),
            block_tables=self._block_tables.rows(num_seqs),
            logits_rows=_filled(self._logits_rows, batch.logits_rows, num_rows),
            block_size=limits.block_size,
            highest_block=-1,
            decode_tokens=self._decode_tokens,
            decode_sequences=self._decode_sequences,
            decode_context=0,
            prefill_sequences=self._prefill_sequences,
        )
        self._block_tables.array[:num_seqs, :width] = batch.block_tables
        found = self._found
        _examine(
            self._token_ids.array[:num_tokens],
            self._positions.array[:num_tokens],
            self._slot_mapping.array[:num_tokens],
            self._query_start.array[: num_seqs + 1],
            self._seq_lens.array[:num_seqs],
            self._block_tables.array[:num_seqs],
            width,
            self._logits_rows.array[:num_rows],
            limits.vocab_size,
            limits.block_size,
            self._decode_tokens,
            self._decode_sequences,
            self._prefill_sequences,
            found,
        )
        fault, where, highest_block, num_decode, context, num_prefill = found.tolist()
        if fault:
            raise EngineError(_explain(fault, where, batch, limits))
        inputs.highest_block = highest_block
        inputs.decode_tokens = self._decode_tokens[:num_decode]
        inputs.decode_sequences = self._decode_sequences[:num_decode]
        inputs.decode_context = context
        inputs.prefill_sequences = self._prefill_sequences[:num_prefill]
        return inputs


def _filled(tensor: HostTensor, values: np.ndarray, count: int) -> HostTensor:
    if values.shape != (count,):
        raise EngineError(f"step with {values.shape} values where {count} are expected")
    rows = tensor.rows(count)
    rows.array[:] = values
    return rows


_FOUND = 6
_BAD_TOKEN, _BAD_POSITION, _BAD_SLOT, _BAD_SEQUENCE, _BAD_BLOCK, _BAD_ROW = range(1, 7)


@kernel()
def _examine(
    token_ids: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    tables: np.ndarray,
    width: int,
    logits_rows: np.ndarray,
    vocab_size: int,
    block_size: int,
    decode_tokens: np.ndarray,
    decode_sequences: np.ndarray,
    prefill_sequences: np.ndarray,
    found: np.ndarray,
) -> None:
    """Check a step and sort its tokens.

    `found`, int64 [`_FOUND`]: fault (0: none), where, highest block, tokens to decode, their context,
    sequences to prefill.
    """
    found[:] = 0
    highest = -1
    tokens, seqs = token_ids.size, seq_lens.size
    for t in range(tokens):
        if token_ids[t] < 0 or token_ids[t] >= vocab_size:
            found[0], found[1] = _BAD_TOKEN, t
            return
        if slots[t] < 0:
            found[0], found[1] = _BAD_SLOT, t
            return
        highest = max(highest, slots[t] // block_size)
    if query_start[0] != 0 or query_start[seqs] != tokens:
        found[0], found[1] = _BAD_SEQUENCE, 0
        return
    decodes, context, prefills = 0, 0, 0
    for s in range(seqs):
        first, last = query_start[s], query_start[s + 1]
        if last < first or last > tokens or seq_lens[s] < last - first or seq_lens[s] > width * block_size:
            found[0], found[1] = _BAD_SEQUENCE, s
            return
        for b in range((seq_lens[s] + block_size - 1) // block_size):
            if tables[s, b] < 0:
                found[0], found[1] = _BAD_BLOCK, s
                return
            highest = max(highest, tables[s, b])
        for t in range(first, last):
            if positions[t] != seq_lens[s] - last + t:
                found[0], found[1] = _BAD_POSITION, t
                return
        if last - first >= _PREFILL_FROM:
            prefill_sequences[prefills] = s
            prefills += 1
        else:
            for t in range(first, last):
                decode_tokens[decodes], decode_sequences[decodes] = t, s
                decodes += 1
                context += positions[t] + 1
    for r in range(logits_rows.size):
        if logits_rows[r] < 0 or logits_rows[r] >= tokens:
            found[0], found[1] = _BAD_ROW, r
            return
    found[2], found[3], found[4], found[5] = highest, decodes, context, prefills


def _explain(fault: int, where: int, batch: StepBatch, limits: StepLimits) -> str:
    if fault == _BAD_TOKEN:
        last = limits.vocab_size - 1
        return f"token_ids[{where}] is {batch.token_ids[where]}: expected an id from 0 to {last}"
    if fault == _BAD_POSITION:
        return (
            f"positions[{where}] is {batch.positions[where]}: expected a sequence's last positions in order"
        )
    if fault == _BAD_SLOT:
        return f"slot_mapping[{where}] is {batch.slot_mapping[where]}: expected 0 or more"
    if fault == _BAD_BLOCK:
        return (
            f"block_tables[{where}] has a negative block among those that hold {batch.seq_lens[where]} tokens"
        )
    if fault == _BAD_ROW:
        rows = batch.logits_rows
        return f"logits_rows[{where}] is {rows[where]}: expected one of {len(batch.token_ids)} tokens"
    first, last = batch.query_start[where : where + 2]
    return (
        f"sequence {where} cannot own tokens {first} to {last} of {len(batch.token_ids)} and have "
        f"{batch.seq_lens[where]} in {batch.block_tables.shape[1]} blocks of {limits.block_size}"
    )
