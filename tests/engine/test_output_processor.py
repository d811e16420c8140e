from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason, PositionLogprobs, RequestUpdate
from engine.output_processor import OutputProcessor
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling_params import SamplingParams
from tests.engine.fakes import request


class ByteTokenizer:
    """Token ids are the bytes of UTF-8; 256 is a special token."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<end>"
        return "".join(
            special if token == 256 else bytes([token]).decode("utf-8", "replace") for token in token_ids
        )

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream("" if skip_special_tokens else "<end>")


class ByteStream:
    def __init__(self, special: str) -> None:
        self.special = special
        self.pending = b""

    def push(self, token_id: int) -> str:
        if token_id == 256:
            return self.special
        self.pending += bytes([token_id])
        try:
            text = self.pending.decode()
        except UnicodeDecodeError:
            return ""
        self.pending = b""
        return text

    def finish(self) -> str:
        return self.pending.decode("utf-8", "replace")


def updates_for(
    name: str, tokens: Sequence[int], reason: FinishReason = FinishReason.LENGTH
) -> list[RequestUpdate]:
    updates = [RequestUpdate(request_id=name, new_token_ids=[token]) for token in tokens]
    updates[-1].finish_reason = reason
    return updates


def collect(
    updates: Sequence[RequestUpdate], params: SamplingParams
) -> tuple[CompletionOutput, list[str], list[str]]:
    """The completion, the pieces it came in, and what the core is told to abort."""
    processor = OutputProcessor(ByteTokenizer())
    processor.add(request("r", [1], params))
    output = RequestOutput("r", None, [1], [CompletionOutput(0)])
    pieces, aborted = [], []
    for update in updates:
        processed = processor.process([update])
        for delta in processed.deltas:
            output.add(delta)
            pieces.append(delta.text)
        aborted += processed.to_abort
    return output.outputs[0], pieces, aborted


def test_characters_are_whole() -> None:
    tokens = list("naïve 🦙".encode())
    output, pieces, _ = collect(updates_for("r", tokens), SamplingParams())
    assert output.text == "naïve 🦙"
    assert output.token_ids == tokens
    assert all("\ufffd" not in piece for piece in pieces)


def test_what_is_incomplete_at_the_end_is_said() -> None:
    output, pieces, _ = collect(updates_for("r", "é".encode()[:1]), SamplingParams())
    assert pieces == ["\ufffd"]
    assert output.finish_reason is FinishReason.LENGTH


def test_a_stop_string_across_tokens_ends_the_request_and_the_core_is_told() -> None:
    updates = [RequestUpdate(request_id="r", new_token_ids=[token]) for token in b"one. Two. Three"]
    output, pieces, aborted = collect(updates, SamplingParams(stop=". T"))
    assert output.text == "one"
    assert output.token_ids == list(b"one. T"), "the tokens up to the one that completed it"
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, ". T")
    assert aborted == ["r"]
    assert pieces == ["o", "n", "e", "", "", ""]
    included, _, _ = collect(updates, SamplingParams(stop=". T", include_stop_str_in_output=True))
    assert included.text == "one. T"


def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    output, _, aborted = collect(updates_for("r", b"abc"), SamplingParams(stop="c"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", FinishReason.STOP, "c")
    assert aborted == [], "the core has ended it already"


def test_text_held_back_comes_out_at_the_end() -> None:
    output, pieces, _ = collect(updates_for("r", b"ab<"), SamplingParams(stop="</s>"))
    assert pieces == ["a", "b", "<"]
    assert (output.text, output.finish_reason) == ("ab<", FinishReason.LENGTH)


def test_stop_strings_count_after_min_tokens() -> None:
    output, _, _ = collect(updates_for("r", b"a.b.c"), SamplingParams(stop=".", min_tokens=2))
    assert output.text == "a.b"


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_the_sequence_is_reported_but_not_shown(skip: bool) -> None:
    updates = updates_for("r", [*b"ab", 256], FinishReason.STOP)
    output, _, _ = collect(updates, SamplingParams(skip_special_tokens=skip))
    assert output.text == "ab"
    assert output.token_ids == [*b"ab", 256]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None
    middle, _, _ = collect(updates_for("r", [97, 256, 98]), SamplingParams(skip_special_tokens=skip))
    assert middle.text == ("ab" if skip else "a<end>b")


def test_a_stop_token_is_the_stop_reason() -> None:
    updates = updates_for("r", b"ab", FinishReason.STOP)
    updates[-1].stop_token_id = ord("b")
    output, _, _ = collect(updates, SamplingParams(stop_token_ids=(98,)))
    assert (output.text, output.stop_reason) == ("a", 98)


def test_several_tokens_in_one_update() -> None:
    update = RequestUpdate(request_id="r", new_token_ids=list(b"ab.cd"))
    output, _, aborted = collect([update], SamplingParams(stop="."))
    assert (output.text, output.token_ids, aborted) == ("ab", list(b"ab."), ["r"])


def test_an_error_is_handed_on() -> None:
    update = RequestUpdate(
        request_id="r", finish_reason=FinishReason.ERROR, error="does not fit", failure_id="f1"
    )
    output, _, _ = collect([update], SamplingParams())
    assert (output.finish_reason, output.error, output.failure_id) == (
        FinishReason.ERROR,
        "does not fit",
        "f1",
    )


def test_n_completions_are_n_core_requests() -> None:
    processor = OutputProcessor(ByteTokenizer())
    params = SamplingParams(n=3, seed=40, prompt_logprobs=1, stop="x")
    messages = processor.add(request("r", [1, 2], params, priority=7))
    assert [message.request_id for message in messages] == ["r/0", "r/1", "r/2"]
    assert [message.params.seed for message in messages] == [40, 41, 42]
    assert [message.params.prompt_logprobs for message in messages] == [1, None, None]
    assert {message.params.n for message in messages} == {1}
    assert {message.priority for message in messages} == {7}
    processed = processor.process(
        [
            RequestUpdate(request_id="r/2", new_token_ids=[97]),
            RequestUpdate(request_id="r/1", new_token_ids=[120]),
        ]
    )
    assert [(delta.request_id, delta.index, delta.text) for delta in processed.deltas] == [
        ("r", 2, "a"),
        ("r", 1, ""),
    ]
    assert processed.to_abort == ["r/1"]
    assert processor.forget("r") == ["r/0", "r/2"]
    assert processor.process([RequestUpdate(request_id="r/0", new_token_ids=[97])]).deltas == []


def test_without_a_seed_completions_have_none() -> None:
    messages = OutputProcessor(ByteTokenizer()).add(request("r", [1], SamplingParams(n=2)))
    assert [message.params.seed for message in messages] == [None, None]


def test_logprobs_come_with_their_tokens_text() -> None:
    position = PositionLogprobs(97, -0.5, 2, [98, 256], [-0.25, -3.0])
    update = RequestUpdate(
        request_id="r", new_token_ids=[97], logprobs=[position], prompt_logprobs=[position, position]
    )
    processor = OutputProcessor(ByteTokenizer())
    processor.add(request("r", [1, 97, 97], SamplingParams(logprobs=2, prompt_logprobs=2)))
    output = RequestOutput("r", None, [1, 97, 97], [CompletionOutput(0)])
    output.add(processor.process([update]).deltas[0])
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    chosen, top = logprobs[0].chosen, logprobs[0].top
    assert (chosen.token, chosen.logprob, chosen.rank) == ("a", -0.5, 2)
    assert [(entry.token, entry.logprob, entry.rank) for entry in top] == [
        ("b", -0.25, 1),
        ("<end>", -3.0, 2),
    ]
    assert output.outputs[0].cumulative_logprob == -0.5
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 3


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    tokens = text.encode("utf-8", "surrogatepass")
    if not tokens or any("\ud800" <= character <= "\udfff" for character in text):
        return
    output, _, _ = collect(updates_for("r", tokens), SamplingParams(stop=tuple(stop)))
    assert text.startswith(output.text)
    if output.finish_reason is FinishReason.LENGTH:
        assert output.text == text
        assert not any(string in text for string in stop)
    else:
        assert text.startswith(output.text + str(output.stop_reason))
