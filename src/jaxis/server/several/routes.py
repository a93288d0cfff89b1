"""llama-server's router endpoints: list of models, loading and unloading."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from jaxis.errors import RequestError
from jaxis.server.context import Parts
from jaxis.server.http.body import LenientModel
from jaxis.server.http.openapi import GENERATION_ERRORS, LOOKUP_ERRORS
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.protocol import Protocol
from jaxis.server.routes.models import ModelList, list_models

router = APIRouter(route_class=StrictJSONRoute)


class ModelRequest(LenientModel):
    model: str


class Done(BaseModel):
    """Answer after success."""

    success: bool = True


@router.get("/models", responses=LOOKUP_ERRORS)
async def list_all(parts: Parts) -> ModelList:
    """Lists the models, as /v1/models does."""
    return await list_models(parts)


@router.post("/models/load", responses=GENERATION_ERRORS)
async def load(body: ModelRequest, parts: Parts) -> Done:
    """Loads a model unless it is loaded; answers once it is."""
    parts.ignored_fields.check(body)
    await parts.models.load(body.model)
    return Done()


@router.post("/models/unload", responses=GENERATION_ERRORS)
async def unload(body: ModelRequest, parts: Parts) -> Done:
    """Unloads a model once its requests have ended, and then answers."""
    parts.ignored_fields.check(body)
    if not await parts.models.unload(body.model):
        raise RequestError("stays loaded: this server has one model", param="model")
    return Done()


PROTOCOL = Protocol(routers=[router])
