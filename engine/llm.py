"""The offline interface: prompts in, completions out, in one process."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TextIO

from cuda.core import MemoryResource

from engine.compose import Engine, Progress, build_engine
from engine.config import EngineConfig, EngineLimits
from engine.errors import EngineError, RequestError
from engine.memory.house import MemoryHouse
from engine.memory.settings import TraceSettings
from engine.messages import AddRequest, RequestUpdate
from engine.model.tokenizer import Tokenizer
from engine.output_processor import OutputProcessor
from engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from engine.request import check_request
from engine.sampling_params import SamplingParams

__all__ = ["LLM", "Message", "Prompt", "RenderedPrompt"]

Message = Mapping[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "…"}``"""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Text that has its special tokens in it, as a chat template wrote them: none are added."""

    text: str


Prompt = str | Sequence[int] | RenderedPrompt
"""Text, token ids, or what `LLM.chat_prompt` returns"""


class LLM:
    """A model that completes prompts.

    ::

        with LLM(model="DIR", kv_cache_memory=10**9) as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
            print(output.outputs[0].text)

    Parameters
    ----------
    model
        Directory of a checkpoint or a Hugging Face id, or a whole `EngineConfig`; then no flags may follow.
    memory
        Where every byte on the device comes from; None: the device's own resource.
    trace
        What to watch; None: as the ``VT_CUDA_ALLOC_…`` variables of the environment say.
    output
        Where trace lines and ``engine-fatal`` go; None: stderr.
    progress
        Told of the load, tensor by tensor.
    flags
        Fields of `EngineConfig`.

    Raises
    ------
    ConfigurationError, CheckpointError
        A flag or the checkpoint cannot be used.
    EngineDeadError
        The engine did not start; ``__cause__`` says why (an `OutOfMemoryError`, say), and a failure record
        tells more.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig,
        *,
        memory: MemoryResource | None = None,
        trace: TraceSettings | None = None,
        output: TextIO | None = None,
        progress: Progress | None = None,
        **flags: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            if flags:
                raise TypeError("flags are fields of EngineConfig: give one or the other")
            config = model
        else:
            config = EngineConfig.from_flags(model=os.fspath(model), **flags)
        self.engine: Engine = build_engine(
            config,
            memory=memory,
            trace=TraceSettings.from_environ(os.environ) if trace is None else trace,
            output=sys.stderr if output is None else output,
            environ=os.environ,
            progress=progress,
        )
        self._processor = OutputProcessor(self.engine.tokenizer)
        self._names = map(str, itertools.count())
        self._running = False

    # -- what it is made of --------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def house(self) -> MemoryHouse:
        """The memory house: trace, statistics, ledger."""
        return self.engine.house

    def close(self) -> None:
        """Give back all memory. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- generation ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        on_delta: Callable[[int, CompletionDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete `prompts` as one continuous batch. Results are in the order of the prompts.

        Parameters
        ----------
        params
            For all prompts, or one for each.
        priorities
            One for each prompt, lower first, under the policy ``priority``.
        on_delta
            Called with the prompt's index and every piece as it comes.

        Raises
        ------
        RequestError
            A prompt or its parameters cannot be served; nothing was generated. A request that fails later has
            the finish reason ``error``, and the others go on.
        EngineDeadError
            The engine stopped.
        """
        run = self._check(prompts, params, priorities)
        with closing(self._run(run)) as pieces:
            for index, delta in pieces:
                if on_delta is not None:
                    on_delta(index, delta)
        return run.outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
    ) -> Generator[tuple[int, CompletionDelta], None, None]:
        """Like `generate`, piece by piece: the prompt's index and what is new. Closing it aborts the rest."""
        return self._run(self._check(prompts, params, priorities))

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the checkpoint's chat template."""
        several = bool(conversations) and not isinstance(conversations[0], Mapping)
        chats: Any = conversations if several else [conversations]
        return self.generate([self.chat_prompt(chat) for chat in chats], params)

    def chat_prompt(self, conversation: str | Sequence[Message]) -> RenderedPrompt:
        """A conversation, or a single question, as the chat template writes it for the model to answer."""
        messages = conversation
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return RenderedPrompt(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))

    # -- the loop ------------------------------------------------------------------------------------------

    def _check(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priorities: Sequence[int] | None,
    ) -> _Run:
        """Check everything, so that nothing is generated if something cannot be."""
        items = _as_list(prompts)
        all_params = _one_each("params", params if params is not None else SamplingParams(), len(items))
        all_priorities = _one_each("priorities", 0 if priorities is None else priorities, len(items))
        run = _Run()
        for prompt, one, priority in zip(items, all_params, all_priorities, strict=True):
            try:
                text, token_ids = self._tokenize(prompt)
                request = AddRequest(
                    request_id=next(self._names), prompt_token_ids=token_ids, params=one, priority=priority
                )
                check_request(request, self.limits)
            except RequestError as error:
                if len(items) == 1:
                    raise
                number = len(run.requests) + 1
                raise RequestError(f"prompt {number}: {error}", field=error.field) from error
            run.add(request, text)
        return run

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        match prompt:
            case str():
                return prompt, self.tokenizer.encode(prompt)
            case RenderedPrompt():
                return prompt.text, self.tokenizer.encode(prompt.text, add_special_tokens=False)
        token_ids = list(prompt)
        if not all(isinstance(token, int) for token in token_ids):
            raise RequestError("prompt: expected text or a list of token ids", field="prompt")
        return None, token_ids

    def _run(self, run: _Run) -> Generator[tuple[int, CompletionDelta], None, None]:
        if self._running:
            raise EngineError("another generate or stream of this LLM is under way: finish or close it first")
        core, processor = self.engine.core, self._processor
        self._running = True
        try:
            for request in run.requests:
                for message in processor.add(request):
                    core.add_request(message)
            updates: list[RequestUpdate] = []
            while core.has_unfinished_requests or updates:
                # Where a step runs by itself, the last one's tokens become text meanwhile.
                core.launch()
                if not core.runs_ahead:
                    updates = core.collect().updates
                processed = processor.process(updates)
                core.abort(processed.to_abort)
                for delta in processed.deltas:
                    index = run.indices[delta.request_id]
                    run.outputs[index].add(delta)
                    yield index, delta
                updates = core.collect().updates if core.runs_ahead else []
        finally:
            # Where something is left, its reader is gone: an error, or a stream that was closed.
            self._running = False
            for request in run.requests:
                core.abort(processor.forget(request.request_id))
            core.settle()


@dataclass(slots=True)
class _Run:
    """One call of `generate` or `stream`, in the order of its prompts."""

    requests: list[AddRequest] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    indices: dict[str, int] = field(default_factory=dict)
    """by request id"""

    def add(self, request: AddRequest, text: str | None) -> None:
        params = request.params
        self.indices[request.request_id] = len(self.requests)
        self.requests.append(request)
        self.outputs.append(
            RequestOutput(
                request.request_id,
                prompt=text,
                prompt_token_ids=request.prompt_token_ids,
                outputs=[CompletionOutput(index) for index in range(params.n)],
                prompt_logprobs=None if params.prompt_logprobs is None else [None],
            )
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str | RenderedPrompt):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} prompts: expected one for each, or one for all")
    return list(value)
