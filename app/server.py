"""The HTTP application: which routes there are, and what stands before them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware

from app.body_limit import BodyLimitMiddleware
from app.closing import ClosingMiddleware, OpenStreams
from app.http_errors import install_error_handlers
from app.protocol.other import ErrorResponse
from app.routes.chat import chat_router
from app.routes.completions import completions_router
from app.routes.health import health_router
from app.routes.models import models_router
from app.routes.tokenize import tokenize_router
from app.security import AccessMiddleware, AccessRules
from app.service import Service

__all__ = ["ServerSettings", "create_app"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "A value cannot be served.",
        401: "No API key, or a wrong one.",
        404: "No such model.",
        413: "The body is too large.",
        422: "A field is missing, unknown, or of the wrong type.",
        429: "Too many requests wait.",
        503: "The engine is not there.",
    }.items()
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the application is to do beside serving."""

    api_keys: tuple[str, ...] = ()
    loopback: bool = True
    """nobody outside this machine reaches the server"""
    max_body_bytes: int = 16 << 20


def create_app(
    service: Service,
    settings: ServerSettings,
    *,
    debug_routers: Iterable[APIRouter] = (),
    streams: OpenStreams | None = None,
) -> FastAPI:
    """The application over `service`.

    Parameters
    ----------
    debug_routers
        Routes under ``/debug``; the access rule stands before them.
    streams
        Ends what has no end of its own when the server stops.
    """
    version = metadata.version("vtserve")
    rules = AccessRules(settings.api_keys, loopback=settings.loopback)
    app = FastAPI(
        title="vtserve",
        version=version,
        summary="An OpenAI-compatible server that accounts for every byte of device memory.",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        # From the outside in: who may ask is decided before a body is read.
        middleware=[
            Middleware(AccessMiddleware, rules),
            Middleware(BodyLimitMiddleware, settings.max_body_bytes),
            Middleware(ClosingMiddleware, streams or OpenStreams()),
        ],
    )
    install_error_handlers(app)
    for router in (
        completions_router(service),
        chat_router(service),
        models_router(service),
        tokenize_router(service),
        health_router(service, version),
        *debug_routers,
    ):
        app.include_router(router)
    return app
