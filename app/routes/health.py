"""``/health``, ``/ping``, ``/version`` and ``/metrics``: each reads a state, and waits for nothing."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter
from starlette.responses import Response

from app.http_errors import unavailable
from app.metrics import CONTENT_TYPE
from app.protocol.other import Health, Version
from app.service import Service

__all__ = ["health_router"]


def health_router(service: Service, version: str) -> APIRouter:
    """The routes, over `service`."""
    router = APIRouter(tags=["Server"])

    async def health() -> Health:
        """200 while the engine is ready, else 503."""
        if not service.ready:
            failure = service.engine.last_failure_id if service.status in ("restarting", "dead") else None
            raise unavailable(f"the engine is {service.status}", failure)
        return cast(Health, {"status": service.status})

    router.add_api_route("/health", health)
    router.add_api_route("/ping", health)

    @router.get("/version")
    async def show_version() -> Version:
        """The server's version."""
        return {"version": version}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return router
