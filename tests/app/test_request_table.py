"""What becomes of requests when engines die, in every order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.in_flight import InFlight
from app.request_table import RequestTable
from app.serving_engine import QueueFullError
from engine.errors import RequestError
from engine.messages import AddRequest, FinishReason, RequestUpdate
from engine.sampling_params import SamplingParams


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return self.decode([token_id])

    def finish(self) -> str:
        return ""


def request(name: str, n: int = 1, priority: int = 0, **params: object) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=[1],
        params=SamplingParams(n=n, **params),  # type: ignore[arg-type]
        priority=priority,
    )


def table(max_queued: int = 4) -> RequestTable:
    return RequestTable(Letters(), max_queued=max_queued)


def token(core_id: str, token_id: int = 0, *, last: bool = False) -> RequestUpdate:
    reason = FinishReason.LENGTH if last else None
    return RequestUpdate(request_id=core_id, new_token_ids=[token_id], finish_reason=reason)


def test_as_many_wait_as_may() -> None:
    requests = table(max_queued=1)
    first = requests.open(request("a"), max_num_seqs=1)
    requests.open(request("b"), max_num_seqs=1)
    with pytest.raises(QueueFullError, match="--max-queued-requests 1"):
        requests.open(request("c"), max_num_seqs=1)
    assert requests.close(first) == ["a"]
    requests.open(request("c"), max_num_seqs=1)
    with pytest.raises(RequestError, match="in use"):
        requests.open(request("c"), max_num_seqs=9)


def test_one_that_is_larger_than_the_queue_runs_alone() -> None:
    requests = table(max_queued=0)
    opened = requests.open(request("a", n=5), max_num_seqs=2)
    assert len(opened.core_requests) == 5


def test_a_stop_string_is_told_to_the_engine() -> None:
    requests = table()
    requests.open(request("a", stop=("c",)), max_num_seqs=1)
    assert requests.process([token("a", 1)]) == []
    assert requests.process([token("a", 2)]) == ["a"]
    assert not requests.is_busy
    assert requests.process([token("a", 3)]) == []


def test_suspects_are_the_first_in_the_schedulers_order() -> None:
    requests = table()
    opened = [
        requests.open(request(name, priority=-number), max_num_seqs=9) for number, name in enumerate("abc")
    ]
    assert requests.suspects(2, by_priority=False) == opened[:2]
    assert requests.suspects(2, by_priority=True) == [opened[2], opened[1]]
    requests.process([token("a", last=True)])
    assert requests.suspects(2, by_priority=False) == opened[1:]


@given(n=st.integers(1, 3), touched=st.booleans())
def test_two_failing_steps_are_one_too_many(n: int, touched: bool) -> None:
    requests = table()
    opened = requests.open(request("a", n=n), max_num_seqs=9)
    names = [core.request_id for core in opened.core_requests]
    if touched:
        requests.process([token(names[-1])])
    requests.engine_died([opened], "first")
    assert opened.finished is touched
    assert [core.request_id for core in requests.to_run()] == ([] if touched else names)
    requests.engine_died(requests.of_core_ids(names), "second")
    assert opened.finished
    assert not requests.is_busy
    assert requests.close(opened) == []


class Deaths(RuleBasedStateMachine):
    """Requests, tokens, clients that leave, and engines that die. What is owed is always known."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = table(max_queued=1000)
        self.opened: list[InFlight] = []
        self.count = 0

    @rule(n=st.integers(1, 3))
    def ask(self, n: int) -> None:
        self.count += 1
        self.opened.append(self.requests.open(request(f"r{self.count}", n=n), max_num_seqs=4))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), last=st.booleans())
    def answer(self, data: st.DataObject, last: bool) -> None:
        cores = list(self.requests.to_run())
        if cores:
            core = data.draw(st.sampled_from(cores))
            self.requests.process([token(core.request_id, last=last)])

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        in_flight = data.draw(st.sampled_from(self.opened))
        self.opened.remove(in_flight)
        before = {core.request_id for core in self.requests.to_run()}
        aborted = self.requests.close(in_flight)
        assert set(aborted) == before & {core.request_id for core in in_flight.core_requests}

    @rule(count=st.integers(0, 3))
    def die(self, count: int) -> None:
        in_step = self.requests.suspects(count, by_priority=False)
        had_output = [in_flight for in_flight in self.opened if in_flight.has_output]
        self.requests.engine_died(in_step, "id")
        assert all(in_flight.finished for in_flight in had_output)
        assert all(in_flight.failing_steps <= 2 for in_flight in self.opened)

    @rule()
    def stop(self) -> None:
        owed = {core.request_id for core in self.requests.to_run()}
        assert set(self.requests.fail_all("stopping", None, FinishReason.ABORT)) == owed
        assert all(in_flight.finished for in_flight in self.opened)

    @invariant()
    def what_is_owed_is_what_runs(self) -> None:
        owed = {core.request_id for core in self.requests.to_run()}
        assert self.requests.is_busy == bool(owed)
        unfinished = [in_flight for in_flight in self.opened if not in_flight.finished]
        assert {in_flight.request.request_id for in_flight in unfinished} == {
            core_id.partition("/")[0] for core_id in owed
        }


TestDeaths = Deaths.TestCase
