"""Text and JSON of results, at once and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.writers import JsonWriter, TextWriter
from engine.messages import FinishReason
from engine.outputs import CompletionDelta, CompletionOutput, Logprob, PositionLogprob, RequestOutput

PROMPTS = ["one", "two\nlines"]
TEXTS = {(0, 0): " fish", (0, 1): "", (1, 0): " für\n☂", (1, 1): "\n"}
EXPECTED = """\
==> 1/2 (1 of 2): one
 fish

==> 1/2 (2 of 2): one


==> 2/2 (1 of 2): two
lines
 für
☂

==> 2/2 (2 of 2): two
lines


"""


def outputs() -> list[RequestOutput]:
    return [
        RequestOutput(
            request_id=str(number),
            prompt=prompt,
            prompt_token_ids=[1, 2],
            outputs=[
                CompletionOutput(index, TEXTS[number, index], [5, 6, 7], finish_reason=FinishReason.LENGTH)
                for index in range(2)
            ],
            num_cached_tokens=number,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def pieces(key: tuple[int, int], sizes: Iterable[int]) -> list[tuple[int, CompletionDelta]]:
    """The text at `key` in pieces of `sizes`; the rest comes with the end."""
    text, start, deltas = TEXTS[key], 0, []
    for size in sizes:
        deltas.append((key[0], CompletionDelta(str(key[0]), key[1], text[start : start + size], [5])))
        start += size
    last = CompletionDelta(str(key[0]), key[1], text[start:], [7], finish_reason=FinishReason.LENGTH)
    return [*deltas, (key[0], last)]


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, CompletionDelta]]:
    """All pieces of all texts, interleaved at random; each text's own pieces in order."""
    queues = [pieces(key, draw(st.lists(st.integers(0, 3), max_size=3))) for key in TEXTS]
    turns = draw(st.permutations([n for n, queue in enumerate(queues) for _ in queue]))
    return [queues[n].pop(0) for n in turns]


def test_text_comes_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    TextWriter(PROMPTS, 2).finish(outputs())
    assert capsys.readouterr().out == EXPECTED


@given(arrivals())
def test_streamed_text_is_the_same_text(deltas: list[tuple[int, CompletionDelta]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("sys.stdout.write", shown.append)
        writer = TextWriter(PROMPTS, 2)
        for prompt_index, delta in deltas:
            writer.update(prompt_index, delta)
        assert "".join(shown) == EXPECTED
        writer.finish(outputs())
    assert "".join(shown) == EXPECTED


def test_the_first_unfinished_completion_is_shown_live(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TextWriter(PROMPTS, 1)
    writer.update(1, CompletionDelta("1", 0, " later", [5]))
    assert capsys.readouterr().out == ""
    writer.update(0, CompletionDelta("0", 0, " now", [5]))
    assert capsys.readouterr().out == "==> 1/2: one\n now"
    writer.update(0, CompletionDelta("0", 0, "!", [6], finish_reason=FinishReason.STOP))
    assert capsys.readouterr().out == "!\n\n==> 2/2: two\nlines\n later"


def test_one_completion_is_bare(capsys: pytest.CaptureFixture[str]) -> None:
    TextWriter(["one"], 1).finish([RequestOutput("0", "one", [1], [CompletionOutput(0, " fish", [5])])])
    assert capsys.readouterr().out == " fish\n"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    results = outputs()
    chosen = Logprob(5, " fish", -0.25, 1)
    results[0].outputs[0].logprobs = [PositionLogprob(chosen, (chosen, Logprob(9, " cat", -1.5, 2)))]
    results[1].outputs[1].error = "no memory"
    JsonWriter("a/model").finish(results)
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == "a/model"
    assert document["usage"] == {"prompt_tokens": 4, "cached_tokens": 1, "completion_tokens": 12}
    assert [result["prompt"] for result in document["results"]] == PROMPTS
    texts = {(r["prompt_index"], o["index"]): o["text"] for r in document["results"] for o in r["outputs"]}
    assert texts == TEXTS
    first = document["results"][0]["outputs"][0]
    assert first["finish_reason"] == "length"
    assert first["logprobs"] == [
        {
            **{"token_id": 5, "token": " fish", "logprob": -0.25, "rank": 1},
            "top": [
                {"token_id": 5, "token": " fish", "logprob": -0.25, "rank": 1},
                {"token_id": 9, "token": " cat", "logprob": -1.5, "rank": 2},
            ],
        }
    ]
    assert document["results"][1]["outputs"][1]["error"] == "no memory"
    assert "error" not in first


def test_streamed_json_is_lines_and_the_document_last(capsys: pytest.CaptureFixture[str]) -> None:
    writer = JsonWriter("m")
    for key in TEXTS:
        for prompt_index, delta in pieces(key, [1, 0]):
            writer.update(prompt_index, delta)
    writer.finish(outputs())
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    texts = dict.fromkeys(TEXTS, "")
    for line in lines:
        texts[line["prompt_index"], line["index"]] += line["text"]
    assert texts == TEXTS
    assert [line["finish_reason"] for line in lines].count("length") == len(TEXTS)
    assert len(last["results"]) == 2
