"""``POST /tokenize`` and ``POST /detokenize``, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter

from app.generation import off_the_loop
from app.http_errors import unavailable
from app.protocol.other import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizePromptRequest,
    TokenizeResponse,
)
from app.service import Service

__all__ = ["tokenize_router"]


def tokenize_router(service: Service) -> APIRouter:
    """The routes, over `service`."""
    router = APIRouter(tags=["Tokens"])

    @router.post("/tokenize")
    async def tokenize(body: TokenizePromptRequest | TokenizeChatRequest) -> TokenizeResponse:
        """Token ids of text, or of a conversation."""
        service.check_model(body.model)
        if isinstance(body, TokenizePromptRequest):
            prompt = await service.text_prompt(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            prompt = await service.chat_prompt(body, add_special_tokens=body.add_special_tokens)
        limits, tokenizer = service.engine.limits, service.tokenizer
        if limits is None:
            raise unavailable(f"the engine is {service.status}")
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.decode([token], skip_special_tokens=False) for token in prompt.token_ids]
        return {
            "count": len(prompt.token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": prompt.token_ids,
            "token_strs": strings,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""
        service.check_model(body.model)
        tokenizer, tokens = service.tokenizer, body.tokens
        text = await off_the_loop(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))
        return {"prompt": text}

    return router
