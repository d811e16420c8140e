"""``GET /v1/models`` and one of them."""

from __future__ import annotations

from fastapi import APIRouter

from app.protocol.other import ModelCard, ModelList
from app.service import Service

__all__ = ["models_router"]


def models_router(service: Service) -> APIRouter:
    """The routes, over `service`."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """All names that the model is served under."""
        return {"object": "list", "data": [service.model_card(name) for name in service.model_names]}

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> ModelCard:
        """One of them; a name may have slashes."""
        service.check_model(model)
        return service.model_card(model)

    return router
