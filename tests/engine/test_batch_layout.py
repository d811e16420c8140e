"""The step's inputs against a layout that writes everything anew, over the life of many sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.protocol import StepBatch
from engine.batch_layout import BatchLayout
from engine.block_pool import BlockPool
from engine.config import EngineLimits
from engine.kv_cache import KVCacheManager
from engine.messages import AddRequest
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, Scheduler

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_model_len=40,
    max_num_batched_tokens=12,
    block_size=4,
    max_logits_rows=6,
    vocab_size=100,
)


def written_anew(scheduled: Sequence[ScheduledRequest]) -> dict[str, list[int]]:
    """Token by token, straight from the definitions in `StepBatch`."""
    found: dict[str, list[int]] = {
        name: []
        for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens", "logits_rows")
    }
    found["query_start"].append(0)
    for item in scheduled:
        for position in range(item.start, item.end):
            if position >= item.logits_start:
                found["logits_rows"].append(len(found["token_ids"]))
            found["token_ids"].append(int(item.request.tokens[position]))
            found["positions"].append(position)
            block = int(item.request.blocks[position // LIMITS.block_size])
            found["slot_mapping"].append(block * LIMITS.block_size + position % LIMITS.block_size)
        found["query_start"].append(len(found["token_ids"]))
        found["seq_lens"].append(item.end)
    return found


def assert_same(batch: StepBatch, scheduled: Sequence[ScheduledRequest]) -> None:
    for name, expected in written_anew(scheduled).items():
        assert getattr(batch, name).tolist() == expected, name
    for row, item in enumerate(scheduled):
        held = item.request.num_blocks
        assert batch.block_tables[row, :held].tolist() == item.request.blocks.tolist()


def test_dtypes_are_the_protocols() -> None:
    request = make_request("a", [1, 2, 3], 0, None)
    request.block_table, request.num_blocks = np.array([5], np.int32), 1
    for batch in (
        BatchLayout(LIMITS).fill([ScheduledRequest(request, 0, 3, 2)]),
        BatchLayout(LIMITS).fill([ScheduledRequest(request, 2, 1, 2)]),
    ):
        assert batch.slot_mapping.dtype == np.int64
        for name in ("token_ids", "positions", "query_start", "seq_lens", "block_tables", "logits_rows"):
            assert getattr(batch, name).dtype == np.int32, name


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=8
    ),
    num_blocks=st.integers(10, 24),
    rolled_back=st.sets(st.integers(0, 30), max_size=3),
)
def test_layout_is_the_one_written_anew(
    arrivals: list[tuple[int, int, bool]], num_blocks: int, rolled_back: set[int]
) -> None:
    scheduler = Scheduler(LIMITS, KVCacheManager(BlockPool(num_blocks), 4, prefix_caching=True))
    layout = BatchLayout(LIMITS)
    queue = [
        make_request(f"r{index}", list(range(index, index + length)), index, 0 if logprobs else None, tokens)
        for index, (length, tokens, logprobs) in enumerate(arrivals)
    ]
    for step in range(400):
        if queue and step % 2 == 0:
            scheduler.add(queue.pop(0))
        scheduled = scheduler.schedule()
        if not scheduled and not queue:
            break
        if not scheduled:
            continue
        assert_same(layout.fill(scheduled), scheduled)
        if step in rolled_back:
            for item in scheduled:
                scheduler.roll_back(item)
            continue
        for item in scheduled:
            request = item.request
            request.num_prompt_logprobs = max(
                request.num_prompt_logprobs, min(item.end, request.num_prompt_tokens - 1)
            )
            if item.samples and request.append((7 * item.end) % 100) is not None:
                scheduler.finish(request)
    assert not scheduler.running
    assert not scheduler.waiting


def make_request(
    name: str, prompt: list[int], arrival: int, prompt_logprobs: int | None, max_tokens: int = 8
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    message = AddRequest(request_id=name, prompt_token_ids=prompt, params=params)
    return Request.create(message, LIMITS, frozenset(), arrival=arrival, key=0)


def test_a_sequence_admitted_again_brings_its_new_blocks() -> None:
    manager = KVCacheManager(BlockPool(8), 4, prefix_caching=False)
    layout = BatchLayout(LIMITS)
    request = make_request("a", list(range(8)), 0, None)
    other = make_request("b", list(range(4)), 1, None)
    assert manager.admit(request)
    item = ScheduledRequest(request, 0, 8, 7)
    before = layout.fill([item]).block_tables[0, :2].tolist()
    manager.release(request)
    assert manager.admit(other)
    assert manager.admit(request)
    assert request.blocks.tolist() != before
    assert layout.fill([item]).block_tables[0, :2].tolist() == request.blocks.tolist()


def test_an_empty_step() -> None:
    batch = BatchLayout(LIMITS).fill([])
    assert len(batch.token_ids) == 0
    assert batch.query_start.tolist() == [0]
