"""Pieces of completions that are read later than they come."""

from __future__ import annotations

import anyio
from hypothesis import given
from hypothesis import strategies as st

from app.in_flight import InFlight
from engine.messages import AddRequest, FinishReason
from engine.outputs import CompletionDelta, CompletionOutput, Logprob, PositionLogprob, RequestOutput
from engine.sampling_params import SamplingParams


def position(token: int) -> PositionLogprob:
    return PositionLogprob(Logprob(token, str(token), -1.0, 1), ())


def piece(index: int, token: int, *, last: bool) -> CompletionDelta:
    return CompletionDelta(
        "r",
        index,
        f"<{token}>",
        [token],
        logprobs=[position(token)],
        finish_reason=FinishReason.LENGTH if last else None,
        stop_reason="end" if last else None,
    )


def empty_output(n: int) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(index) for index in range(n)])


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    data=st.data(),
)
def test_read_late_or_at_once_it_is_the_same(counts: list[int], data: st.DataObject) -> None:
    n = len(counts)
    deltas = []
    left = list(counts)
    while any(left):
        index = data.draw(st.sampled_from([index for index in range(n) if left[index]]))
        left[index] -= 1
        deltas.append(piece(index, len(deltas), last=not left[index]))
    expected = empty_output(n)
    for delta in deltas:
        expected.add(delta)

    async def read() -> tuple[RequestOutput, int]:
        request = AddRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(n=n))
        in_flight, output = InFlight(request), empty_output(n)
        for delta in map(copy, deltas):
            in_flight.put(delta)
            if data.draw(st.booleans()):
                got = await in_flight.get()
                assert got is not None
                output.add(got)
        assert in_flight.finished
        pieces = 0
        while (got := await in_flight.get()) is not None:
            output.add(got)
            pieces += 1
        return output, in_flight.num_tokens

    output, tokens = anyio.run(read)
    assert output == expected
    assert tokens == len(deltas)


def copy(delta: CompletionDelta) -> CompletionDelta:
    """One of its own: pieces that wait are added to."""
    return piece(delta.index, delta.token_ids[0], last=delta.finish_reason is not None)


def test_failing_ends_what_has_not_ended() -> None:
    async def read() -> list[CompletionDelta]:
        request = AddRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(n=3))
        in_flight = InFlight(request)
        in_flight.put(piece(1, 5, last=True))
        in_flight.fail("the engine stopped", "id")
        in_flight.fail("again", "other")
        found = []
        while (delta := await in_flight.get()) is not None:
            found.append(delta)
        return found

    found = anyio.run(read)
    assert [(delta.index, delta.error, delta.failure_id) for delta in found] == [
        (1, None, None),
        (0, "the engine stopped", "id"),
        (2, "the engine stopped", "id"),
    ]
