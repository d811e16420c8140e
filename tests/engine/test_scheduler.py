"""The scheduler, with blocks and prefix cache under it, driven through a core over a predictable model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from engine.backend.protocol import StepBatch
from engine.memory.errors import AllocationRequest, OutOfMemoryError
from engine.memory.scope import current_requests
from engine.messages import FinishReason, RequestUpdate
from engine.sampling_params import SamplingParams
from tests.engine.fakes import (
    FakeEngine,
    ended,
    expected_greedy,
    make_engine,
    request,
    tokens_of,
)

PROMPTS = {"short": [1, 2, 3], "long": list(range(40)), "middle": [7, 8, 9, 10, 11, 12, 13, 14, 15]}
EXPECTED = {name: expected_greedy(prompt, 8) for name, prompt in PROMPTS.items()}


def run_all(engine: FakeEngine) -> dict[str, list[int]]:
    updates = engine.run(*(request(name, prompt) for name, prompt in PROMPTS.items()))
    return {name: tokens_of(updates[name]) for name in PROMPTS}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("batched_tokens", [4, 7, 16, 128])
def test_chunks_do_not_change_tokens(tmp_path: Path, batched_tokens: int, prefix_caching: bool) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=batched_tokens, prefix_caching=prefix_caching)
    assert run_all(engine) == EXPECTED


def test_preemption_does_not_change_tokens(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_blocks=16)
    assert run_all(engine) == EXPECTED
    assert engine.core.scheduler.preemptions == 0, "a pool that holds all three needs no preemption"
    engine = make_engine(tmp_path, num_blocks=12, max_model_len=48)
    prompts = {name: [i, i + 1, i + 2] for i, name in enumerate("abcd")}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    updates = engine.run(*(request(name, prompt, params) for name, prompt in prompts.items()))
    assert {name: tokens_of(updates[name]) for name in prompts} == {
        name: expected_greedy(prompt, 30) for name, prompt in prompts.items()
    }
    assert engine.core.scheduler.preemptions > 0


def test_decode_and_prefill_share_a_step(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=8)
    engine.core.add_request(request("a", [1, 2, 3]))
    engine.core.step()
    engine.core.add_request(request("b", list(range(20))))
    stats = engine.core.step().stats
    assert (stats.decode_tokens, stats.prefill_tokens) == (1, 7)


def test_first_come_first_served(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_seqs=1)
    for index, name in enumerate("abc"):
        engine.core.add_request(request(name, [index], priority=-index))
    assert finish_order(engine) == ["a", "b", "c"]


def test_priority_goes_first_and_arrival_decides_between_equals(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_seqs=1, policy="priority")
    for index, (name, priority) in enumerate([("a", 5), ("b", 0), ("c", 5), ("d", -1)]):
        engine.core.add_request(request(name, [index], priority=priority))
    assert finish_order(engine) == ["d", "b", "a", "c"]


def test_the_lowest_priority_is_preempted(tmp_path: Path) -> None:
    engine = make_engine(
        tmp_path, num_blocks=9, max_model_len=36, max_num_seqs=2, policy="priority", prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine.core.add_request(request("low", [1, 2, 3], params, priority=9))
    engine.core.step()
    engine.core.add_request(request("high", [4, 5, 6], params, priority=1))
    assert finish_order(engine) == ["high", "low"]
    assert engine.core.scheduler.preemptions >= 1


def finish_order(engine: FakeEngine) -> list[str]:
    finished: list[str] = []
    while engine.core.has_unfinished_requests:
        finished += [u.request_id for u in engine.core.step().updates if u.finish_reason is not None]
    return finished


def test_equal_prefixes_are_computed_once(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=128)
    prompt = list(range(30))
    first = engine.run(request("a", prompt))["a"]
    assert first[0].num_cached_tokens == 0
    before = engine.model.computed_tokens
    second = engine.run(request("b", [*prompt, 50, 51]))["b"]
    assert second[0].num_cached_tokens == 28
    assert engine.model.computed_tokens - before == 32 - 28 + 7
    assert tokens_of(second) == expected_greedy([*prompt, 50, 51], 8)
    assert engine.core.step().stats.prefix_hits == 28


def test_equal_prompts_of_one_step_share_blocks(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=128)
    prompt = list(range(33))
    updates = engine.run(request("a", prompt), request("b", prompt))
    assert tokens_of(updates["a"]) == tokens_of(updates["b"]) == expected_greedy(prompt, 8)
    assert updates["b"][0].num_cached_tokens == 32


def test_a_prompt_that_is_cached_whole_computes_its_last_block(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    prompt = list(range(16))
    engine.run(request("a", prompt))
    updates = engine.run(request("b", prompt))["b"]
    assert updates[0].num_cached_tokens == 12
    assert tokens_of(updates) == expected_greedy(prompt, 8)


def test_a_block_in_the_middle_is_only_found_behind_its_own_beginning(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.run(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    updates = engine.run(request("b", [9, 2, 3, 4, 5, 6, 7, 8, 9]))["b"]
    assert updates[0].num_cached_tokens == 0
    assert tokens_of(updates) == expected_greedy([9, 2, 3, 4, 5, 6, 7, 8, 9], 8)


def test_prefix_caching_off_finds_nothing(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, prefix_caching=False)
    prompt = list(range(20))
    engine.run(request("a", prompt))
    assert engine.run(request("b", prompt))["b"][0].num_cached_tokens == 0
    assert engine.pool.num_cached == 0


def test_prompt_logprobs_take_no_more_rows_than_there_are(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    prompt = list(range(25))
    engine = make_engine(tmp_path, max_logits_rows=7)
    updates = engine.run(request("a", prompt, params), request("b", [*prompt, 3], params))
    for name, tokens in (("a", prompt), ("b", [*prompt, 3])):
        positions = [p for update in updates[name] for p in update.prompt_logprobs or ()]
        assert [position.token_id for position in positions] == tokens[1:]
        assert updates[name][0].num_cached_tokens == 0, "every prompt position's logits are needed"


def test_prompt_logprobs_are_reported_once_if_the_prompt_is_preempted_halfway(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_blocks=14, max_model_len=56, max_num_seqs=2)
    first = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    second = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    prompt = list(range(37))
    updates = engine.run(request("a", [1, 2, 3], first), request("b", prompt, second))
    assert engine.core.scheduler.preemptions == 1
    positions = [p.token_id for update in updates["b"] for p in update.prompt_logprobs or ()]
    assert positions == prompt[1:]
    assert tokens_of(updates["b"]) == expected_greedy(prompt, 2)


def test_what_a_failed_sequence_was_to_write_is_not_shared(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=128)

    def fail_a(batch: StepBatch) -> None:
        if "a" in current_requests():
            raise OutOfMemoryError(AllocationRequest(size=1))

    engine.model.before_step = fail_a
    prompt = list(range(21))
    updates = engine.run(request("a", prompt), request("b", prompt), request("c", [5]))
    assert ended(updates["a"]) is FinishReason.ERROR
    assert updates["b"][0].num_cached_tokens == 0
    assert tokens_of(updates["b"]) == expected_greedy(prompt, 8)
    assert tokens_of(updates["c"]) == expected_greedy([5], 8)


def test_an_interrupted_step_is_computed_again(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=128)

    def interrupt(batch: StepBatch) -> None:
        raise KeyboardInterrupt

    prompt = list(range(21))
    engine.core.add_request(request("a", prompt))
    engine.model.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.core.step()
    engine.model.before_step = lambda batch: None
    assert engine.pool.num_held == engine.pool.num_cached == 0
    updates = engine.run(request("b", prompt))
    assert tokens_of(updates["a"]) == tokens_of(updates["b"]) == expected_greedy(prompt, 8)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go, run out of blocks and of memory. Prompts are over two tokens, so prefixes meet."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.engine = make_engine(
            Path(self.directory.name),
            num_blocks=10,
            max_model_len=32,
            max_num_seqs=3,
            max_num_batched_tokens=9,
            max_logits_rows=5,
        )
        self.engine.model.before_step = self._run_out_of_memory
        self.prompts: dict[str, tuple[list[int], SamplingParams]] = {}
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.aborted: set[str] = set()
        self.most_seqs = 3
        self.too_large: str | None = None
        self.launched = False

    def _run_out_of_memory(self, batch: StepBatch) -> None:
        if len(batch.seq_lens) > self.most_seqs or self.too_large in current_requests():
            raise OutOfMemoryError(AllocationRequest(size=1))

    @rule(
        target=ids,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 8),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(self, prompt: list[int], max_tokens: int, prompt_logprobs: int | None) -> object:
        name = str(len(self.prompts))
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        self.prompts[name] = (prompt, params)
        self.engine.core.add_request(request(name, prompt, params))
        return name

    @rule(name=ids)
    def abort(self, name: str) -> None:
        if name not in self._finished():
            self.aborted.add(name)
        self.engine.core.abort([name])

    @rule()
    def step(self) -> None:
        self._step()

    @rule()
    def launch(self) -> None:
        """What comes until the next step happens while this one is computed."""
        if not self.launched:
            self.engine.core.launch()
            self.launched = True

    @rule()
    def lose_the_launched_step(self) -> None:
        self.engine.core.settle()
        self.launched = False

    @rule()
    def step_that_fits_one_sequence(self) -> None:
        self.most_seqs = 1
        self._step()
        self.most_seqs = 3

    @rule(name=ids)
    def step_in_which_one_does_not_fit(self, name: str) -> None:
        self.too_large = name
        self._step()
        self.too_large = None

    def _step(self) -> None:
        outputs = self.engine.core.collect() if self.launched else self.engine.core.step()
        self.launched = False
        for update in outputs.updates:
            self.updates.setdefault(update.request_id, []).append(update)

    @invariant()
    def blocks_are_held_by_those_that_run(self) -> None:
        pool, scheduler = self.engine.pool, self.engine.core.scheduler
        references = np.zeros(pool.num_blocks, int)
        for running in scheduler.running:
            blocks = running.blocks.tolist()
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            assert running.num_computed_tokens <= running.num_tokens
            assert len(blocks) * 4 >= running.num_computed_tokens
            references[blocks] += 1
            # A block that several hold is full and has the same tokens before and in it for all of them.
            for other in scheduler.running:
                for index in np.flatnonzero(np.isin(running.blocks, other.blocks)):
                    assert running.blocks[index] == other.blocks[index]
                    end = 4 * (int(index) + 1)
                    if running is not other:
                        assert running.tokens[:end].tolist() == other.tokens[:end].tolist()
        assert [pool.references(block) for block in range(pool.num_blocks)] == references.tolist()
        assert pool.num_free == int((references == 0).sum())
        for waiting in scheduler.waiting:
            assert waiting.num_blocks == waiting.num_computed_tokens == 0

    @invariant()
    def order_is_kept(self) -> None:
        scheduler = self.engine.core.scheduler
        for queue in (scheduler.waiting, scheduler.running):
            assert queue == sorted(queue, key=scheduler.order)
        assert len(scheduler.running) <= 3

    def _finished(self) -> set[str]:
        return {name for name, updates in self.updates.items() if ended(updates) is not None}

    def teardown(self) -> None:
        for name, updates in self.engine.run().items():
            self.updates.setdefault(name, []).extend(updates)
        for name, (prompt, params) in self.prompts.items():
            updates = self.updates.get(name, [])
            assert params.max_tokens is not None
            expected = expected_greedy(prompt, min(params.max_tokens, 32 - len(prompt)))
            failed = bool(updates) and ended(updates) is FinishReason.ERROR
            if name in self.aborted or failed:
                assert tokens_of(updates) == expected[: len(tokens_of(updates))]
            else:
                assert tokens_of(updates) == expected
                assert ended(updates) is FinishReason.LENGTH
                if params.prompt_logprobs is not None:
                    positions = [p.token_id for u in updates for p in u.prompt_logprobs or ()]
                    assert positions == prompt[1:]
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        self.directory.cleanup()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
