"""A step's inputs: copied to io memory, checked, and sorted into what attention does with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.cpu.backend import CpuBackend
from engine.backend.cpu.inputs import HostStepInputs
from engine.backend.protocol import StepBatch
from engine.errors import EngineError
from tests.backend.cpu.conftest import LIMITS
from tests.backend.cuda.reference import Sequences


def make_batch(lengths: list[int], queries: list[int]) -> StepBatch:
    blocks = sum(-(-length // LIMITS.block_size) for length in lengths)
    columns = max((-(-length // LIMITS.block_size) for length in lengths), default=1)
    return Sequences(lengths, queries, LIMITS.block_size).batch(np.random.default_rng(0), blocks, columns)


@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from([1, 2, 3, 4, 30])),
        min_size=1,
        max_size=LIMITS.max_seqs,
    )
)
@settings(max_examples=40, deadline=None)
def test_prepare(backend: CpuBackend, sequences: list[tuple[int, int]]) -> None:
    lengths, queries = [length for length, _ in sequences], [min(pair) for pair in sequences]
    batch = make_batch(lengths, queries)
    inputs = backend.prepare(batch)
    assert isinstance(inputs, HostStepInputs)
    assert inputs.host is batch
    for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens", "logits_rows"):
        copy = getattr(inputs, name)
        np.testing.assert_array_equal(copy.array, getattr(batch, name))
        assert copy.shape == getattr(batch, name).shape
        assert not np.shares_memory(copy.array, getattr(batch, name))
    width = batch.block_tables.shape[1]
    np.testing.assert_array_equal(inputs.block_tables.array[:, :width], batch.block_tables)

    decodes = [
        (t, s)
        for s, (first, last) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True))
        for t in range(first, last)
        if last - first < 4
    ]
    assert list(zip(inputs.decode_tokens, inputs.decode_sequences, strict=True)) == decodes
    assert inputs.decode_context == sum(batch.positions[t] + 1 for t, _ in decodes)
    assert inputs.prefill_sequences.tolist() == [s for s, count in enumerate(queries) if count >= 4]
    assert inputs.highest_block == batch.block_tables.max()


def test_a_step_without_tokens(backend: CpuBackend) -> None:
    inputs = backend.prepare(
        StepBatch(
            token_ids=np.empty(0, np.int32),
            positions=np.empty(0, np.int32),
            slot_mapping=np.empty(0, np.int64),
            query_start=np.zeros(1, np.int32),
            seq_lens=np.empty(0, np.int32),
            block_tables=np.empty((0, 0), np.int32),
            logits_rows=np.empty(0, np.int32),
        )
    )
    assert (inputs.num_tokens, inputs.num_logits_rows) == (0, 0)


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


BATCH = make_batch([40, 7, 100], [40, 1, 2])
FAULTS = {
    "token beyond the vocabulary": (
        {"token_ids": changed(BATCH.token_ids, 5, LIMITS.vocab_size)},
        r"token_ids\[5\] is 1000: expected an id from 0 to 999",
    ),
    "negative token": ({"token_ids": changed(BATCH.token_ids, 42, -1)}, r"token_ids\[42\] is -1"),
    "position out of order": ({"positions": changed(BATCH.positions, 3, 9)}, r"positions\[3\] is 9"),
    "negative slot": ({"slot_mapping": changed(BATCH.slot_mapping, 8, -16)}, r"slot_mapping\[8\] is -16"),
    "block that was not given": (
        {"block_tables": changed(BATCH.block_tables, 2, -1)},
        r"block_tables\[2\] has a negative block among those that hold 100 tokens",
    ),
    "row of no token": ({"logits_rows": np.array([0, 43], np.int32)}, r"logits_rows\[1\] is 43"),
    "tokens of no sequence": ({"query_start": changed(BATCH.query_start, 3, 42)}, "sequence 0 cannot own"),
    "sequence that runs backwards": (
        {"query_start": changed(BATCH.query_start, 2, 3)},
        "sequence 1 cannot own",
    ),
    "sequence shorter than its chunk": (
        {"seq_lens": changed(BATCH.seq_lens, 0, 39)},
        "sequence 0 cannot own",
    ),
    "sequence longer than its table": (
        {"seq_lens": changed(BATCH.seq_lens, 2, 113)},
        "sequence 2 cannot own tokens 41 to 43 of 43 and have 113 in 7 blocks of 16",
    ),
    "positions missing": ({"positions": BATCH.positions[:-1]}, r"\(42,\) values where 43 are expected"),
    "more tokens than reserved": (
        {"token_ids": np.zeros(LIMITS.max_tokens + 1, np.int32)},
        f"step of {LIMITS.max_tokens + 1} tokens: expected at most {LIMITS.max_tokens}",
    ),
    "more sequences than reserved": (
        {"seq_lens": np.ones(LIMITS.max_seqs + 1, np.int32)},
        "17 sequences: expected at most 16",
    ),
    "more logits than reserved": (
        {"logits_rows": np.zeros(LIMITS.max_logits_rows + 1, np.int32)},
        "65 rows of logits: expected at most 64",
    ),
    "wider table than reserved": (
        {"block_tables": np.zeros((3, LIMITS.max_blocks_per_seq + 1), np.int32)},
        "513 blocks of a sequence: expected at most 512",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_lead_a_kernel_astray_is_refused(backend: CpuBackend, fault: str) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(EngineError, match=message):
        backend.prepare(replace(BATCH, **changes))
    backend.prepare(BATCH)
