"""The engine over a real checkpoint, against the reference's greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigurationError, EngineError, RequestError
from engine.llm import LLM
from engine.memory.adaptors import StatisticsMemoryResource
from engine.memory.resources import HostMemoryResource
from engine.memory.settings import TraceSettings
from engine.messages import FinishReason
from engine.outputs import CompletionOutput
from engine.sampling_params import SamplingParams

GREEDY32 = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
OFF = TraceSettings()


@pytest.fixture(scope="module")
def checkpoint(shared_checkpoints: Path) -> Path:
    """One whose greedy tokens all lead by more than 0.05, so that no rounding exchanges two."""
    return shared_checkpoints / "qwen2" / "NVFP4-modelopt"


@pytest.fixture(scope="module")
def reference(shared_checkpoints: Path) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads(
        (shared_checkpoints / "qwen2" / "ref-NVFP4-modelopt.json").read_text()
    )["prompts"]
    assert len(prompts) == 6
    assert min(min(prompt["greedy32_margin_top1_top2"]) for prompt in prompts) > 0.05
    return prompts


def open_llm(checkpoint: Path, **flags: Any) -> LLM:
    standard = {"device": "cpu", "kv_cache_dtype": "bfloat16", "kv_cache_memory": 8 << 20, "threads": 1}
    return LLM(checkpoint, trace=flags.pop("trace", OFF), **{**standard, **flags})


@pytest.fixture(scope="module", params=[False, True], ids=["waits", "runs ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    """One that makes text after each step, and one that does so while the next step is under way."""
    with open_llm(checkpoint, max_num_batched_tokens=1024) as llm:
        backend: Any = llm.engine.core._runner._backend  # type: ignore[union-attr]
        backend.runs_ahead = request.param
        assert llm.engine.core.runs_ahead is request.param
        yield llm


def prompts_of(reference: list[dict[str, Any]]) -> list[list[int]]:
    return [prompt["token_ids"] for prompt in reference]


def greedy_of(reference: list[dict[str, Any]]) -> list[list[int]]:
    return [prompt["greedy32"] for prompt in reference]


# -- the same tokens, however they are computed ------------------------------------------------------------


def test_one_at_a_time(llm: LLM, reference: list[dict[str, Any]]) -> None:
    tokens = [llm.generate(prompt, GREEDY32)[0].outputs[0].token_ids for prompt in prompts_of(reference)]
    assert tokens == greedy_of(reference)


@pytest.mark.parametrize(
    "flags",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 2, "max_num_batched_tokens": 64},
        {"block_size": 1},
        {"block_size": 32, "max_num_batched_tokens": 50},
    ],
    ids=str,
)
def test_batched_and_chunked(
    checkpoint: Path, reference: list[dict[str, Any]], flags: dict[str, Any]
) -> None:
    with open_llm(checkpoint, **flags) as llm:
        outputs = llm.generate(prompts_of(reference), GREEDY32)
    assert [output.outputs[0].token_ids for output in outputs] == greedy_of(reference)
    assert all(output.outputs[0].finish_reason is FinishReason.LENGTH for output in outputs)


def test_preempted(checkpoint: Path, reference: list[dict[str, Any]]) -> None:
    # Room for the longest sequence and little else.
    with open_llm(
        checkpoint, max_model_len=352, kv_cache_memory=24 * 8192, max_num_batched_tokens=512
    ) as llm:
        assert llm.engine.kv_plan.num_blocks == 24
        prompts = prompts_of(reference)
        outputs = llm.generate([*prompts[:5], *prompts], GREEDY32)
        assert llm.engine.core.scheduler.preemptions > 0
    greedy = greedy_of(reference)
    assert [output.outputs[0].token_ids for output in outputs] == [*greedy[:5], *greedy]


def test_from_the_prefix_cache(checkpoint: Path, reference: list[dict[str, Any]]) -> None:
    with open_llm(checkpoint) as llm:
        first = llm.generate(prompts_of(reference), GREEDY32)
        again = llm.generate(prompts_of(reference), GREEDY32)
    assert [output.num_cached_tokens for output in first] == [0] * 6
    lengths = [len(prompt) for prompt in prompts_of(reference)]
    assert [output.num_cached_tokens for output in again] == [(n - 1) // 16 * 16 for n in lengths]
    assert max(lengths) > 16
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (first, again)]
    assert tokens == [greedy_of(reference)] * 2


def test_an_fp8_cache_changes_nothing_between_ways_of_computing(
    checkpoint: Path, reference: list[dict[str, Any]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    prompts = prompts_of(reference)
    with open_llm(checkpoint, kv_cache_dtype="fp8") as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
        cached = [output.outputs[0] for output in llm.generate(prompts, params)]
    with open_llm(checkpoint, kv_cache_dtype="fp8", max_num_batched_tokens=9) as llm:
        chunked = [output.outputs[0] for output in llm.generate(prompts, params)]
    compared = 0
    for index, completion in enumerate(alone):
        clear = clear_lead(completion)
        compared += clear
        for other in (cached[index], chunked[index]):
            assert other.token_ids[:clear] == completion.token_ids[:clear]
    assert compared > 100, "nearly all of 192 tokens lead clearly"


def clear_lead(completion: CompletionOutput) -> int:
    """How many tokens from the start lead by so much that no rounding exchanges them with the second."""
    assert completion.logprobs is not None
    leads = [position.top[0].logprob - position.top[1].logprob for position in completion.logprobs]
    return next((index for index, lead in enumerate(leads) if lead < 0.05), len(leads))


def test_a_seed_gives_the_same_tokens_in_any_batch(llm: LLM, reference: list[dict[str, Any]]) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=16, ignore_eos=True)
        for seed in range(6)
    ]
    prompts = prompts_of(reference)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [
        llm.generate(prompt, one)[0].outputs[0].token_ids for prompt, one in zip(prompts, params, strict=True)
    ]
    assert together == alone
    assert together != greedy_of(reference)


# -- the interface -----------------------------------------------------------------------------------------


def test_several_completions_are_seeded_one_after_the_other(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    [output] = llm.generate([[1, 2, 3]], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for index, completion in enumerate(output.outputs):
        single = SamplingParams(seed=5 + index, max_tokens=8, ignore_eos=True)
        assert llm.generate([1, 2, 3], single)[0].outputs[0].token_ids == completion.token_ids
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_text_is_the_tokenizers(llm: LLM) -> None:
    [output] = llm.generate("the cat", GREEDY32)
    assert output.prompt == "the cat"
    assert output.prompt_token_ids == llm.tokenizer.encode("the cat")
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    text = llm.generate([1, 2, 3], GREEDY32)[0].outputs[0].text
    stop = text[4:7]
    [output] = llm.generate(
        [1, 2, 3], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop=stop)
    )
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    assert not llm.engine.core.has_unfinished_requests


def test_prompt_logprobs_are_the_references_logits(
    llm: LLM, reference: list[dict[str, Any]], shared_checkpoints: Path
) -> None:
    archive = np.load(shared_checkpoints / "qwen2" / "ref-NVFP4-modelopt.logits.npz")
    whole = [name for name in archive.files if name.endswith("_all")]
    assert whole
    for name in whole:
        logits = archive[name].astype(np.float64)
        prompt = next(p["token_ids"] for p in reference if archive_name(p, reference) == name)
        [output] = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        found = [position.chosen.logprob for position in output.prompt_logprobs[1:] if position is not None]
        assert len(found) == len(prompt) - 1
        np.testing.assert_allclose(
            found, expected[np.arange(len(found)), prompt[1:]], atol=0.05 * logits.std()
        )


def archive_name(prompt: dict[str, Any], reference: list[dict[str, Any]]) -> str:
    return f"{prompt.get('name', reference.index(prompt))}_all"


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(conversation, GREEDY32)
    assert output.prompt is not None
    assert "hello" in output.prompt
    assert len(output.prompt) > len("hello")
    assert llm.generate(llm.chat_prompt("hello"), GREEDY32)[0].prompt == output.prompt
    assert len(llm.chat([conversation, conversation], GREEDY32)) == 2


def test_pieces_add_up_and_come_with_their_prompts_index(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    whole = llm.generate(prompts, GREEDY32)
    texts = ["", ""]
    seen = []
    for index, delta in llm.stream(prompts, GREEDY32):
        texts[index] += delta.text
        seen.append(index)
    assert texts == [output.outputs[0].text for output in whole]
    assert set(seen[:2]) == {0, 1}, "both run at once"
    called: list[int] = []
    llm.generate(prompts, GREEDY32, on_delta=lambda index, delta: called.append(index))
    assert sorted(called) == sorted(seen)


def test_a_stream_that_is_closed_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream([[1, 2, 3], [4]], GREEDY32)
    next(stream)
    with pytest.raises(EngineError, match="another generate or stream"):
        llm.generate([1], GREEDY32)
    stream.close()
    assert not llm.engine.core.has_unfinished_requests
    assert llm.engine.core.scheduler.kv.pool.num_held == 0
    assert llm.generate([1], GREEDY32)[0].finished


def test_a_reader_that_throws_leaves_nothing_behind(llm: LLM) -> None:
    def throw(index: int, delta: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2], GREEDY32, on_delta=throw)
    assert not llm.engine.core.has_unfinished_requests
    assert llm.generate([1], GREEDY32)[0].finished


def test_nothing_is_generated_if_one_prompt_cannot_be(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 2: prompt: expected at least one token"):
        llm.generate([[1], []], GREEDY32)
    with pytest.raises(RequestError, match="prompt: token id 512: the vocabulary has 0 to 511"):
        llm.generate([512], GREEDY32)
    with pytest.raises(RequestError, match="prompt: expected text or a list of token ids"):
        llm.generate([["a"]], GREEDY32)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY32])
    assert not llm.engine.core.has_unfinished_requests
    assert llm.generate([], GREEDY32) == []


# -- memory ------------------------------------------------------------------------------------------------


def test_steady_state_allocates_nothing(checkpoint: Path) -> None:
    memory = StatisticsMemoryResource(HostMemoryResource(1 << 28))
    with open_llm(checkpoint, memory=memory, max_num_seqs=4, max_num_batched_tokens=32) as llm:
        after_load = memory.statistics().total
        assert after_load.allocations > 10
        for index in range(90):
            params = SamplingParams(temperature=index % 2, seed=index, max_tokens=1 + index % 5, logprobs=2)
            llm.generate([[index + 1] * (1 + index % 50), [7, index]], params)
        assert llm.engine.core.step().stats.step > 200
        assert memory.statistics().total == after_load
    assert memory.live == 0


@pytest.mark.parametrize("trace", [OFF, TraceSettings(trace=True, stats=True)], ids=["off", "on"])
def test_every_byte_comes_from_the_injected_memory_and_goes_back(
    checkpoint: Path, trace: TraceSettings
) -> None:
    memory = StatisticsMemoryResource(HostMemoryResource(1 << 28))
    llm = open_llm(checkpoint, memory=memory, trace=trace)
    segments = {tag.partition("/")[0] for tag in memory.live_by_tag()}
    assert {"weights", "kv", "workspace"} <= segments <= {"weights", "kv", "workspace", "io"}
    llm.generate([1, 2, 3], GREEDY32)
    llm.close()
    assert memory.live == 0
    statistics = memory.statistics().total
    assert statistics.allocations == statistics.frees > 0
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([1], GREEDY32)


def test_the_cache_follows_the_checkpoint_or_the_flag(checkpoint: Path, shared_checkpoints: Path) -> None:
    sizes = {}
    for name, directory in (("fp8", checkpoint), ("none", shared_checkpoints / "qwen2" / "NVFP4A16-ct")):
        for dtype in ("auto", "fp8", "fp8_e4m3", "bfloat16"):
            with open_llm(directory, kv_cache_dtype=dtype) as llm:
                sizes[name, dtype] = llm.engine.kv_plan.num_blocks
    wide, narrow = sizes["fp8", "bfloat16"], sizes["fp8", "fp8"]
    assert narrow == 2 * wide
    assert sizes["fp8", "auto"] == sizes["fp8", "fp8_e4m3"] == sizes["none", "fp8"] == narrow
    assert sizes["none", "auto"] == sizes["none", "bfloat16"] == wide


def test_flags_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype 'int8'"):
        LLM("m", kv_cache_dtype="int8", trace=OFF)
    with pytest.raises(ConfigurationError, match="--speed: the engine has no such flag"):
        LLM("m", speed=1, trace=OFF)
