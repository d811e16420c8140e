"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.generation import Generation, Prompt
from app.http_errors import ApiError, JsonResponse
from app.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from app.protocol.logprobs import completion_logprobs, prompt_logprobs
from app.protocol.usage import Usage, usage_of
from app.routes.responses import DONE, NO_CLIENT, STREAMED, error_event, finish_reason
from app.service import Service
from app.streaming import Emit, EventStream, server_sent_event, unless_disconnected
from engine.outputs import CompletionDelta, PositionLogprob, RequestOutput

__all__ = ["completions_router"]


def completions_router(service: Service) -> APIRouter:
    """The route, over `service`."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/completions",
        response_model=None,
        responses={200: {"model": Completion, "content": STREAMED, "description": "The completions."}},
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Complete one or several prompts."""
        service.check_open()
        service.check_model(body.model)
        service.check_priority(body.priority)
        body.check()
        answer = _Answer(service, body, await _prompts(service, body))
        if body.stream:
            return EventStream(answer.stream, error_event, answer.headers)
        outputs = await unless_disconnected(request.receive, answer.generation.collect)
        return NO_CLIENT if outputs is None else JsonResponse(answer.whole(outputs), headers=answer.headers)

    return router


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    tokenizer = service.tokenizer
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(await service.text_prompt(prompt, add_special_tokens=body.add_special_tokens))
        else:
            if not all(0 <= token < 2**31 for token in prompt):
                raise ApiError(400, "prompt: expected token ids from 0 to 2147483647", param="prompt")
            text = tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else None
            prompts.append(Prompt(text, prompt))
    return prompts


class _Answer:
    """Turns a generation into a response."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[Prompt]) -> None:
        self._body = body
        self._model = service.model_name
        self._tokenizer = service.tokenizer
        self._only_echo = bool(body.echo) and body.max_tokens == 0
        self._echo_logprobs = bool(body.echo) and body.logprobs is not None
        if self._echo_logprobs and body.prompt_logprobs is None:
            body.prompt_logprobs = body.logprobs
        params = body.sampling_params(
            max_tokens=1 if self._only_echo else body.max_tokens, logprobs=body.logprobs
        )
        self._n = params.n
        self.generation = Generation(
            service.engine, service.metrics, prompts, params, prefix="cmpl-", priority=body.priority or 0
        )
        self.headers = {"X-Request-Id": self.generation.id}

    # -- at once -------------------------------------------------------------------------------------------

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        """The response that has everything."""
        choices: list[CompletionChoice] = []
        for number, output in enumerate(outputs):
            for completion in output.outputs:
                choice = self._choice(
                    number * self._n + completion.index,
                    "" if self._only_echo else completion.text,
                    None if self._only_echo else completion.logprobs,
                    completion,
                    output if self._body.echo else None,
                )[0]
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                if self._body.return_token_ids:
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choices.append(choice)
        return self._response(choices, usage_of(outputs, count_output=not self._only_echo))

    # -- in pieces -----------------------------------------------------------------------------------------

    async def stream(self, emit: Emit) -> None:
        """Send everything as it comes."""
        outputs = self.generation.outputs
        offsets = [[0] * self._n for _ in outputs]
        echoed = [[not self._body.echo] * self._n for _ in outputs]
        held: list[list[CompletionDelta]] = [[] for _ in outputs]
        async with self.generation.deltas() as deltas:
            async for number, delta in deltas:
                output = outputs[number]
                held[number].append(delta)
                if self._echo_logprobs and len(output.prompt_logprobs or ()) < len(output.prompt_token_ids):
                    continue  # the echo is not complete, and the rest comes after it
                events = b""
                for piece in held[number]:
                    echo = None if echoed[number][piece.index] else output
                    if not (piece.text or piece.token_ids or piece.finish_reason or echo):
                        continue
                    echoed[number][piece.index] = True
                    choice, offsets[number][piece.index] = self._choice(
                        number * self._n + piece.index,
                        "" if self._only_echo else piece.text,
                        None if self._only_echo else piece.logprobs,
                        piece,
                        echo,
                        offsets[number][piece.index],
                    )
                    events += server_sent_event(self._chunk([choice]))
                held[number].clear()
                if events:
                    await emit(events)
        if self._body.include_usage:
            usage = usage_of(outputs, count_output=not self._only_echo)
            await emit(server_sent_event(self._response([], usage)))
        await emit(DONE)

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        usage = None
        if self._body.continuous_usage:
            usage = usage_of(self.generation.outputs, count_output=not self._only_echo)
        chunk = self._response(choices, usage)
        if not self._body.include_usage and usage is None:
            del chunk["usage"]
        return chunk

    # -- both ----------------------------------------------------------------------------------------------

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        generation = self.generation
        return {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: list[PositionLogprob] | None,
        piece: Any,
        echo: RequestOutput | None,
        offset: int = 0,
    ) -> tuple[CompletionChoice, int]:
        """A choice, with the prompt of `echo` before it, and where the text of what follows begins.

        `piece` is a `CompletionDelta` or `CompletionOutput`.
        """
        entries: CompletionLogprobs | None = None
        if self._body.logprobs is not None:
            positions: list[PositionLogprob | None] = [*(logprobs or ())]
            first = ""
            if echo is not None:
                positions = [*(echo.prompt_logprobs or ()), *positions]
                first = self._tokenizer.decode(echo.prompt_token_ids[:1], skip_special_tokens=False)
            entries, offset = completion_logprobs(
                positions, first, offset, as_ids=bool(self._body.return_tokens_as_token_ids)
            )
        choice: CompletionChoice = {
            "index": index,
            "text": text if echo is None else (echo.prompt or "") + text,
            "logprobs": entries,
            "finish_reason": "length" if self._only_echo else finish_reason(piece),
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice, offset
