from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.backend.protocol import StepBatch
from engine.errors import EngineDeadError, RequestError
from engine.failure_record import read_failure
from engine.memory.errors import AllocationRequest, OutOfMemoryError, StickyDeviceError, Why
from engine.memory.scope import current_requests
from engine.messages import (
    Abort,
    AddRequest,
    EngineFailed,
    EngineMessage,
    FinishReason,
    OutputMessage,
    RequestUpdate,
    Shutdown,
    StepOutputs,
)
from engine.sampling_params import SamplingParams
from tests.engine.fakes import (
    EOS,
    GREEDY,
    VOCABULARY,
    FakeBackend,
    FakeEngine,
    ended,
    expected_greedy,
    logits_after,
    make_engine,
    request,
    tokens_of,
)


@pytest.fixture(autouse=True, params=[False, True], ids=["waits", "runs ahead"])
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the backend computes when it is asked to, or when it is waited for."""
    ahead: bool = request.param
    monkeypatch.setattr(FakeBackend, "runs_ahead", ahead)
    return ahead


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


def prompt_that_ends_after(count: int) -> list[int]:
    """A prompt whose greedy continuation has its first end-of-sequence token as token number `count`."""
    for start in range(10_000):
        prompt = [start % VOCABULARY, start // VOCABULARY]
        if EOS in (tokens := expected_greedy(prompt, count)) and tokens.index(EOS) == count - 1:
            return prompt
    raise AssertionError("no such prompt")


# -- how sequences end -------------------------------------------------------------------------------------


def test_the_end_of_sequence_ends_it_unless_it_is_ignored(tmp_path: Path) -> None:
    prompt = prompt_that_ends_after(3)
    engine = make_engine(tmp_path)
    updates = engine.run(request("a", prompt, greedy(ignore_eos=False)), request("b", prompt, greedy()))
    assert tokens_of(updates["a"]) == expected_greedy(prompt, 3)
    assert ended(updates["a"]) is FinishReason.STOP
    assert updates["a"][-1].stop_token_id is None
    assert tokens_of(updates["b"]) == expected_greedy(prompt, 8)
    assert ended(updates["b"]) is FinishReason.LENGTH


def test_a_stop_token_ends_it_and_is_told(tmp_path: Path) -> None:
    expected = expected_greedy([1, 2, 3], 8)
    updates = make_engine(tmp_path).run(request("a", [1, 2, 3], greedy(stop_token_ids=(expected[4],))))
    assert tokens_of(updates["a"]) == expected[:5]
    assert (ended(updates["a"]), updates["a"][-1].stop_token_id) == (FinishReason.STOP, expected[4])


def test_what_would_end_it_is_not_chosen_before_min_tokens(tmp_path: Path) -> None:
    prompt = prompt_that_ends_after(1)
    params = greedy(ignore_eos=False, min_tokens=4, max_tokens=6)
    tokens = tokens_of(make_engine(tmp_path).run(request("a", prompt, params))["a"])
    assert len(tokens) >= 5
    assert EOS not in tokens[:4]


def test_the_models_length_ends_it(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_model_len=12)
    updates = engine.run(request("a", [1] * 9, greedy(max_tokens=None)), request("b", [1] * 11))
    assert len(tokens_of(updates["a"])) == 3
    assert len(tokens_of(updates["b"])) == 1
    assert ended(updates["a"]) is ended(updates["b"]) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request("a", []), "prompt"),
        (request("a", [1] * 64), "prompt"),
        (request("a", [VOCABULARY]), "prompt"),
        (request("a", [-1]), "prompt"),
        (request("a", [1], greedy(stop_token_ids=(VOCABULARY,))), "stop_token_ids"),
        (request("a", [1], greedy(logit_bias={VOCABULARY: 1.0})), "logit_bias"),
        (request("a", [1], greedy(logprobs=21)), "logprobs"),
        (request("a", [1], greedy(prompt_logprobs=21)), "prompt_logprobs"),
        (request("taken", [1]), "request_id"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, message: AddRequest, field: str) -> None:
    engine = make_engine(tmp_path)
    engine.core.add_request(request("taken", [1]))
    with pytest.raises(RequestError) as caught:
        engine.core.add_request(message)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert list(engine.run()) == ["taken"], "the others are served"


def test_an_id_can_be_used_again_after_the_end(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert engine.run(request("a", [1])).keys() == engine.run(request("a", [1])).keys() == {"a"}


def test_an_abort_frees_blocks_at_once(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_seqs=1)
    engine.core.add_request(request("a", [1] * 9))
    engine.core.add_request(request("b", [2] * 9))
    engine.core.step()
    assert engine.pool.num_held == 3
    engine.core.abort(["a", "b", "nobody"])
    assert engine.pool.num_held == 0
    assert not engine.core.has_unfinished_requests
    assert engine.core.step().updates == []


# -- seeds -------------------------------------------------------------------------------------------------


def sampled(engine: FakeEngine, *messages: AddRequest) -> dict[str, list[int]]:
    return {name: tokens_of(updates) for name, updates in engine.run(*messages).items()}


def test_a_seed_gives_the_same_tokens_in_any_batch_chunking_and_preemption(tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=1234, max_tokens=20, ignore_eos=True)
    prompt = list(range(13))
    alone = sampled(make_engine(tmp_path), request("a", prompt, params))["a"]
    assert len(alone) == 20
    others = [request(f"o{i}", [i] * (5 + i), greedy(max_tokens=30)) for i in range(4)]
    for engine in (
        make_engine(tmp_path, seed=99),
        make_engine(tmp_path, max_num_batched_tokens=4),
        make_engine(tmp_path, prefix_caching=False),
        make_engine(tmp_path, num_blocks=18, max_model_len=72),
    ):
        assert sampled(engine, *others, request("a", prompt, params))["a"] == alone
    assert engine.core.scheduler.preemptions > 0
    other = msgspec.structs.replace(params, seed=1235)
    assert sampled(make_engine(tmp_path), request("a", prompt, other))["a"] != alone


def test_without_a_seed_the_engines_seed_and_the_turn_decide(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    messages = [request("a", [1, 2], params), request("b", [1, 2], params)]
    first = sampled(make_engine(tmp_path, seed=5), *messages)
    assert first == sampled(make_engine(tmp_path, seed=5), *messages)
    assert first["a"] != first["b"]
    assert first != sampled(make_engine(tmp_path, seed=6), *messages)
    assert sampled(make_engine(tmp_path, seed=None), *messages) != first


# -- log probabilities -------------------------------------------------------------------------------------


def test_logprobs_of_output_and_prompt(tmp_path: Path) -> None:
    prompt = list(range(20))
    updates = make_engine(tmp_path, max_num_batched_tokens=8).run(
        request("a", prompt, greedy(logprobs=3, prompt_logprobs=2, max_tokens=3)), request("b", prompt)
    )
    output = [position for update in updates["a"] for position in update.logprobs or ()]
    assert [position.token_id for position in output] == tokens_of(updates["a"])
    assert all(position.rank == 1 and len(position.top_token_ids) == 3 for position in output)
    positions = [position for update in updates["a"] for position in update.prompt_logprobs or ()]
    assert [position.token_id for position in positions] == prompt[1:]
    logits = logits_after(prompt[:7]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert positions[6].logprob == pytest.approx(expected[prompt[7]], abs=1e-5)
    assert positions[6].top_token_ids == np.argsort(-expected)[:2].tolist()
    assert all(update.logprobs is None for update in updates["b"])


# -- when a step goes wrong --------------------------------------------------------------------------------


def allocation_failure(**fields: Any) -> OutOfMemoryError:
    facts = {"size": 606 << 20, "tag": "workspace/scratch", "site": "linear.py:7", "sequence": 717, **fields}
    return OutOfMemoryError(AllocationRequest(**facts))


def test_logits_that_are_not_numbers_fail_their_request_by_name(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    runner: Any = engine.core._runner
    forward = runner._forward

    def damaged(inputs: Any) -> Any:
        logits = forward(inputs)
        names = current_requests()
        if "bad" in names:
            logits[names.index("bad")] = np.nan
        return logits

    runner._forward = damaged
    updates = engine.run(request("bad", [1, 2, 3, 4, 5]), request("good", [1, 2, 3, 4, 5, 6]))
    assert tokens_of(updates["bad"]) == []
    assert ended(updates["bad"]) is FinishReason.ERROR
    error = updates["bad"][-1].error
    assert error is not None
    assert error.startswith("request bad: logits after token 5 are not numbers")
    assert tokens_of(updates["good"]) == expected_greedy([1, 2, 3, 4, 5, 6], 8)
    assert engine.run(request("later", [1, 2, 3, 4, 5]))["later"][0].num_cached_tokens == 0


def test_a_request_that_cannot_fit_alone_fails_alone(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)

    def fail(batch: StepBatch) -> None:
        if "large" in current_requests():
            raise allocation_failure(requests=current_requests())

    engine.model.before_step = fail
    updates = engine.run(request("a", [1, 2]), request("large", [3] * 10), request("b", [4, 5]))
    assert tokens_of(updates["a"]) == expected_greedy([1, 2], 8)
    assert tokens_of(updates["b"]) == expected_greedy([4, 5], 8)
    failed = updates["large"][-1]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error.startswith(
        "request large: does not fit in memory: allocation #717 of 606.0 MiB failed"
    )
    record = read_failure(tmp_path / f"{failed.failure_id}.json")
    assert not record.fatal
    assert [entry.request_id for entry in record.requests] == ["large"]
    assert engine.stderr.getvalue() == ""
    assert engine.pool.num_held == 0
    assert tokens_of(engine.run(request("next", [3] * 3))["next"]) == expected_greedy([3] * 3, 8)


def test_a_single_request_that_does_not_fit_is_not_fatal(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)

    def fail(batch: StepBatch) -> None:
        raise allocation_failure()

    engine.model.before_step = fail
    assert ended(engine.run(request("a", [1]))["a"]) is FinishReason.ERROR
    engine.model.before_step = lambda batch: None
    assert tokens_of(engine.run(request("b", [1]))["b"]) == expected_greedy([1], 8)


def test_memory_that_suffices_for_nobody_is_fatal(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)

    def fail(batch: StepBatch) -> None:
        raise allocation_failure()

    engine.model.before_step = fail
    engine.core.add_request(request("a", [1]))
    engine.core.add_request(request("b", [2]))
    with pytest.raises(EngineDeadError) as caught:
        engine.core.step()
    assert isinstance(caught.value.__cause__, OutOfMemoryError)
    assert engine.stderr.getvalue().startswith(
        "engine-fatal: EngineCore busy loop threw: allocation #717 of 606.0 MiB failed: out of memory"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("kernel\n misfired"), "RuntimeError: kernel misfired"),
        (
            StickyDeviceError(AllocationRequest(size=8, error="illegal address", why=Why.EARLIER_ERROR)),
            "allocation of 8 B failed: illegal address",
        ),
    ],
)
def test_anything_else_is_fatal_and_recorded(tmp_path: Path, error: Exception, line: str) -> None:
    engine = make_engine(tmp_path)
    engine.core.add_request(request("a", [1, 2, 3], GREEDY))
    engine.core.step()
    engine.core.add_request(request("b", [4] * 9, greedy(max_tokens=5, seed=3)))

    def fail(batch: StepBatch) -> None:
        raise error

    engine.model.before_step = fail
    with pytest.raises(EngineDeadError) as caught:
        engine.core.step()
    assert caught.value.__cause__ is error
    assert engine.stderr.getvalue().startswith(f"engine-fatal: EngineCore busy loop threw: {line}")
    assert engine.core.failure is not None
    record = read_failure(tmp_path / f"{engine.core.failure.id}.json")
    assert caught.value.failure_id == record.id
    assert str(tmp_path / f"{record.id}.json") in str(caught.value)
    assert record.fatal
    assert record.what.startswith(line)
    assert record.exception.message == str(error)
    assert any("before_step" in line for line in record.exception.traceback)
    assert record.step is not None
    assert (record.step.step, record.step.prefill_tokens, record.step.decode_tokens) == (2, 9, 1)
    assert (record.step.num_running, record.step.num_waiting, record.step.num_used_blocks) == (2, 0, 4)
    a, b = record.requests
    assert (a.request_id, a.prompt_tokens, a.output_tokens, a.computed_tokens) == ("a", 3, 1, 3)
    assert (b.request_id, b.prompt_tokens, b.output_tokens, b.params.seed) == ("b", 9, 0, 3)
    assert a.prompt is a.prompt_token_ids is None, "prompts are private"
    for use in (engine.core.step, lambda: engine.core.add_request(request("c", [1]))):
        with pytest.raises(EngineDeadError, match="the engine stopped; failure record"):
            use()


def test_prompts_are_recorded_when_asked_for(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, record_prompts=True)
    engine.failures.decode = lambda token_ids: " ".join(map(str, token_ids))
    engine.core.add_request(request("a", [7, 8, 9]))

    def fail(batch: StepBatch) -> None:
        raise RuntimeError

    engine.model.before_step = fail
    with pytest.raises(EngineDeadError):
        engine.core.step()
    assert engine.core.failure is not None
    record = read_failure(tmp_path / f"{engine.core.failure.id}.json")
    assert record.requests[0].prompt_token_ids == [7, 8, 9]
    assert record.requests[0].prompt == "7 8 9"


# -- the busy loop -----------------------------------------------------------------------------------------


class LoopThread:
    """The busy loop in a thread, messages to and from it encoded as for another process."""

    def __init__(self, engine: FakeEngine) -> None:
        self.inbox: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[OutputMessage] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.engine = engine
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.core.run_busy_loop(self.inbox, self.outbox)
        except EngineDeadError as error:
            self.error = error

    def send(self, message: EngineMessage) -> None:
        self.inbox.put(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EngineMessage))

    def receive(self) -> OutputMessage:
        message = self.outbox.get(timeout=30)
        received: OutputMessage = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=OutputMessage)
        return received

    def updates_until_end_of(self, name: str) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        while True:
            outputs = self.receive()
            assert isinstance(outputs, StepOutputs)
            for update in outputs.updates:
                if update.request_id == name:
                    updates.append(update)
                    if update.finish_reason is not None:
                        return updates


def test_the_busy_loop_serves_refuses_aborts_and_leaves(tmp_path: Path) -> None:
    loop = LoopThread(make_engine(tmp_path))
    loop.send(request("a", [1, 2, 3]))
    assert tokens_of(loop.updates_until_end_of("a")) == expected_greedy([1, 2, 3], 8)
    loop.send(request("bad", []))
    refused = loop.updates_until_end_of("bad")[-1]
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error is not None
    assert refused.error.startswith("prompt: ")
    loop.send(request("long", [1], greedy(max_tokens=60)))
    loop.send(Abort(["long"]))
    loop.send(request("b", [4, 5]))
    assert tokens_of(loop.updates_until_end_of("b")) == expected_greedy([4, 5], 8)
    loop.send(Shutdown())
    loop.thread.join(30)
    assert not loop.thread.is_alive()
    assert loop.error is None
    assert loop.engine.pool.num_held == 0


def test_the_busy_loop_says_that_it_threw(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)

    def fail(batch: StepBatch) -> None:
        raise RuntimeError("lost")

    engine.model.before_step = fail
    loop = LoopThread(engine)
    loop.send(request("a", [1]))
    failed = loop.receive()
    loop.thread.join(30)
    assert isinstance(failed, EngineFailed)
    assert failed.what == "RuntimeError: lost"
    assert isinstance(loop.error, EngineDeadError)
    assert loop.error.failure_id == failed.failure_id


# -- a step under way --------------------------------------------------------------------------------------


def test_requests_come_and_go_while_a_step_is_computed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    core = engine.core
    for name, prompt in (("a", [1, 2, 3]), ("b", [4] * 9)):
        core.add_request(request(name, prompt))
    core.launch()
    core.abort(["b"])
    core.add_request(request("c", [5, 6]))
    updates = core.collect().updates
    assert [update.request_id for update in updates] == ["a"], "what nobody waits for is not told"
    first = tokens_of(updates)
    later = engine.run()
    assert first + tokens_of(later["a"]) == expected_greedy([1, 2, 3], 8)
    assert tokens_of(later["c"]) == expected_greedy([5, 6], 8)
    assert engine.pool.num_held == 0


def test_an_id_is_free_again_while_its_old_step_is_computed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.core.add_request(request("a", [1, 2, 3]))
    engine.core.launch()
    engine.core.abort(["a"])
    engine.core.add_request(request("a", [7, 8]))
    assert engine.core.collect().updates == []
    assert tokens_of(engine.run()["a"]) == expected_greedy([7, 8], 8)


def test_a_step_that_nobody_collects_is_computed_again(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.core.add_request(request("a", [1, 2, 3]))
    engine.core.step()
    engine.core.launch()
    engine.core.settle()
    engine.core.settle()
    tokens = tokens_of(engine.run()["a"])
    assert tokens == expected_greedy([1, 2, 3], 8)[1:]


def test_a_step_that_fails_when_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tmp_path)
    engine.core.add_request(request("a", [1, 2, 3]))
    runner: Any = engine.core._runner

    def lost(step: Any) -> None:
        raise RuntimeError("an illegal memory access")

    engine.core.launch()
    monkeypatch.setattr(runner, "collect", lost)
    with pytest.raises(EngineDeadError):
        engine.core.collect()
    assert engine.core.failure is not None
    record = read_failure(tmp_path / f"{engine.core.failure.id}.json")
    assert [item.request_id for item in record.requests] == ["a"]
    engine.core.settle()  # of a dead engine nothing is waited for
    engine.core.close()


def test_a_wait_that_is_interrupted_leaves_the_engine_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tmp_path)
    engine.core.add_request(request("a", [1, 2, 3]))
    runner: Any = engine.core._runner

    def interrupted(step: Any) -> None:
        raise KeyboardInterrupt

    engine.core.launch()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.core.collect()
    assert tokens_of(engine.run()["a"]) == expected_greedy([1, 2, 3], 8)


def test_what_a_step_did_is_put_out_while_the_next_is_computed(tmp_path: Path, runs_ahead: bool) -> None:
    """Each step's outputs come before its successor is waited for; where a step runs by itself, after that
    was launched."""
    engine = make_engine(tmp_path)
    runner: Any = engine.core._runner
    launch, collect = runner.launch, runner.collect
    order: list[str] = []

    def note(name: str, act: Any) -> Any:
        def noted(argument: Any) -> Any:
            order.append(name)
            return act(argument)

        return noted

    runner.launch, runner.collect = note("launch", launch), note("collect", collect)
    inbox: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()
    inbox.put(request("a", [1, 2, 3], greedy(max_tokens=3)))
    outbox = _Stopping(order, inbox)
    engine.core.run_busy_loop(inbox, outbox)
    if runs_ahead:
        step = ["launch", "put", "collect"]
        assert order == ["launch", "collect", *step, *step, "put"]
    else:
        assert order == ["launch", "collect", "put"] * 3
    assert tokens_of(outbox.updates) == expected_greedy([1, 2, 3], 3)


class _Stopping:
    """An outbox that ends the loop when the request has ended."""

    def __init__(self, order: list[str], inbox: queue.SimpleQueue[EngineMessage]) -> None:
        self.order, self.inbox = order, inbox
        self.updates: list[RequestUpdate] = []

    def put(self, message: OutputMessage) -> None:
        assert isinstance(message, StepOutputs)
        self.order.append("put")
        self.updates += message.updates
        if message.updates[-1].finish_reason is not None:
            self.inbox.put(Shutdown())
