"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.generation import Generation, Prompt
from app.http_errors import JsonResponse
from app.protocol.chat import ChatChunkChoice, ChatCompletion, ChatCompletionChunk, ChatRequest, DeltaMessage
from app.protocol.fields import renamed_errors
from app.protocol.logprobs import chat_logprobs, prompt_logprobs
from app.protocol.usage import Usage, usage_of
from app.routes.responses import DONE, NO_CLIENT, STREAMED, error_event, finish_reason
from app.service import Service
from app.streaming import Emit, EventStream, server_sent_event, unless_disconnected
from engine.outputs import CompletionDelta, RequestOutput

__all__ = ["chat_router"]


def chat_router(service: Service) -> APIRouter:
    """The route, over `service`."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: {"model": ChatCompletion, "content": STREAMED, "description": "The answers."}},
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_open()
        service.check_model(body.model)
        service.check_priority(body.priority)
        body.check()
        prompt = await service.chat_prompt(body, add_special_tokens=body.add_special_tokens)
        answer = _Answer(service, body, prompt)
        if body.stream:
            return EventStream(answer.stream, error_event, answer.headers)
        outputs = await unless_disconnected(request.receive, answer.generation.collect)
        if outputs is None:
            return NO_CLIENT
        return JsonResponse(answer.whole(outputs[0]), headers=answer.headers)

    return router


class _Answer:
    """Turns a generation into a response."""

    def __init__(self, service: Service, body: ChatRequest, prompt: Prompt) -> None:
        self._body = body
        self._model = service.model_name
        names = dict(body.RENAMED)
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with renamed_errors(names):
            params = body.sampling_params(max_tokens=body.token_limit, logprobs=body.num_logprobs)
            self.generation = Generation(
                service.engine,
                service.metrics,
                [prompt],
                params,
                prefix="chatcmpl-",
                priority=body.priority or 0,
            )
        self._echoed = _last_text(body) if body.echo else ""
        self.headers = {"X-Request-Id": self.generation.id}

    def whole(self, output: RequestOutput) -> ChatCompletion:
        """The response that has everything."""
        as_ids = bool(self._body.return_tokens_as_token_ids)
        response: ChatCompletion = {
            "id": self.generation.id,
            "object": "chat.completion",
            "created": self.generation.created,
            "model": self._model,
            "choices": [
                {
                    "index": completion.index,
                    "message": {"role": "assistant", "content": self._echoed + completion.text},
                    "logprobs": None
                    if completion.logprobs is None
                    else chat_logprobs(completion.logprobs, as_ids=as_ids),
                    "finish_reason": finish_reason(completion),
                    "stop_reason": completion.stop_reason,
                }
                for completion in output.outputs
            ],
            "usage": usage_of([output]),
        }
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
            for choice, completion in zip(response["choices"], output.outputs, strict=True):
                choice["token_ids"] = completion.token_ids
        return response

    async def stream(self, emit: Emit) -> None:
        """Send everything as it comes: for each choice its role, then its text."""
        [output] = self.generation.outputs
        begun = [False] * len(output.outputs)
        async with self.generation.deltas() as deltas:
            async for _, delta in deltas:
                if not (delta.text or delta.token_ids or delta.finish_reason):
                    continue
                events = b""
                if not begun[delta.index]:
                    begun[delta.index] = True
                    start: DeltaMessage = {"role": "assistant", "content": self._echoed}
                    events = self._event(_chunk_choice(delta.index, start))
                events += self._event(self._choice(delta))
                await emit(events)
        if self._body.include_usage:
            await emit(server_sent_event(self._chunk([], usage_of([output]))))
        await emit(DONE)

    def _choice(self, delta: CompletionDelta) -> ChatChunkChoice:
        choice = _chunk_choice(delta.index, {"content": delta.text} if delta.text else {})
        choice["finish_reason"] = finish_reason(delta)
        choice["stop_reason"] = delta.stop_reason
        if delta.logprobs is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            choice["logprobs"] = chat_logprobs(delta.logprobs, as_ids=as_ids)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _event(self, choice: ChatChunkChoice) -> bytes:
        usage = usage_of(self.generation.outputs) if self._body.continuous_usage else None
        chunk = self._chunk([choice], usage)
        if not self._body.include_usage and usage is None:
            del chunk["usage"]
        return server_sent_event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        generation = self.generation
        return {
            "id": generation.id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }


def _chunk_choice(index: int, delta: DeltaMessage) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _last_text(body: ChatRequest) -> str:
    """The last message's text, if it is the assistant's: what an echo repeats."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(p.text or "" for p in last.content)
