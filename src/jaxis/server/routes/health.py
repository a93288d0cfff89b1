"""Health checks, version and metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.protocol.errors import LOOKUP_ERRORS
from jaxis.version import __version__

router = APIRouter()
_JSON = {"application/json": {"schema": {"type": "object", "properties": {"status": {"type": "string"}}}}}
_UP_OR_NOT: dict[int | str, dict[str, Any]] = {
    200: {"content": _JSON},
    503: {"description": "Not now", "content": _JSON},
}
Context = Annotated[ServerContext, Depends(get_context)]


@router.get("/health", responses=_UP_OR_NOT)
async def health(context: Context) -> Response:
    """200 while the engine makes progress or has nothing to do; 503 tells a supervisor to restart the server."""
    if context.engine.is_making_progress:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "the engine makes no progress"}, status_code=503)


@router.get("/ping", responses=_UP_OR_NOT)
@router.post("/ping", responses=_UP_OR_NOT)
async def ping(context: Context) -> Response:
    """The same as /health, where Amazon SageMaker looks for it."""
    return await health(context)


@router.get("/load", responses=LOOKUP_ERRORS)
async def load(context: Context) -> dict[str, int]:
    """How many completions run or wait, for load balancers; under vLLM's name."""
    return {"server_load": context.engine.num_reserved}


@router.get("/ready", responses=_UP_OR_NOT)
async def ready(context: Context) -> Response:
    """200 while new requests are welcome; 503 during shutdown too."""
    if context.engine.is_accepting and context.engine.is_making_progress:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready"}, status_code=503)


@router.get("/version", responses=LOOKUP_ERRORS)
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response, responses=LOOKUP_ERRORS | {200: {"content": {"text/plain": {}}}})
async def metrics(context: Context) -> Response:
    """Metrics for Prometheus."""
    return Response(context.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
