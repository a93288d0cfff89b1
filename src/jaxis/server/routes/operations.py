"""Endpoints for operators: health checks, version, metrics, and resets of the server's state."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from jaxis.server.context import Parts
from jaxis.server.http.api_keys import current_api_key
from jaxis.server.http.openapi import ADMIN_ERRORS, LOOKUP_ERRORS
from jaxis.server.protocol import Protocol
from jaxis.version import __version__

router = APIRouter()
_JSON = {"application/json": {"schema": {"type": "object", "properties": {"status": {"type": "string"}}}}}
_UP_OR_NOT: dict[int | str, dict[str, Any]] = {
    200: {"content": _JSON},
    503: {"description": "Not now", "content": _JSON},
}


@router.get("/health", responses=_UP_OR_NOT)
async def health(parts: Parts) -> Response:
    """Answers 200 while the engine makes progress or is idle; 503 tells a supervisor to restart the server."""
    if parts.models.is_making_progress:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "the engine makes no progress"}, status_code=503)


@router.get("/ping", responses=_UP_OR_NOT)
@router.post("/ping", responses=_UP_OR_NOT)
async def ping(parts: Parts) -> Response:
    """Answers as /health does, at the path that Amazon SageMaker uses."""
    return await health(parts)


@router.get("/load", responses=LOOKUP_ERRORS)
async def load(parts: Parts) -> dict[str, int]:
    """Returns the number of running and waiting completions for load balancers, under vLLM's name."""
    contexts = [entry.context for entry in parts.models.entries()]
    return {"server_load": sum(context.engine.num_reserved for context in contexts if context is not None)}


@router.get("/ready", responses=_UP_OR_NOT)
async def ready(parts: Parts) -> Response:
    """Answers 200 while new requests are accepted, and 503 otherwise, such as during shutdown."""
    if parts.models.is_accepting and parts.models.is_making_progress:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready"}, status_code=503)


@router.get("/version", responses=LOOKUP_ERRORS)
async def version() -> dict[str, str]:
    """Returns the server's version."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response, responses=LOOKUP_ERRORS | {200: {"content": {"text/plain": {}}}})
async def metrics(parts: Parts) -> Response:
    """Returns the metrics for Prometheus."""
    return Response(parts.server_metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def check_admin() -> None:
    """Answers 403 to keys without `admin`."""
    key = current_api_key.get()
    if key is None or not key.admin:
        raise HTTPException(
            403, "this needs a key with admin: true in the file of --api-key-file: make one with jaxis new-key --admin"
        )


class Success(BaseModel):
    """Answer after success."""

    success: bool = True


@router.post("/reset_prefix_cache", responses=ADMIN_ERRORS, dependencies=[Depends(check_admin)])
async def reset_prefix_cache(parts: Parts) -> Success:
    """Empties the prefix caches of all loaded models, under vLLM's name. Later requests find nothing in them."""
    for entry in parts.models.entries():
        if entry.context is not None:
            entry.context.engine.reset_prefix_cache()
    return Success()


PROTOCOL = Protocol(routers=[router])
