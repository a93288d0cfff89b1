"""llama-server's own way to continue a prompt."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.endpoints.llama_completion import LlamaCompletionRun
from jaxis.server.http.json_body import StrictJSONRoute
from jaxis.server.http.sse import respond, respond_stream
from jaxis.server.protocol.errors import GENERATION_RESPONSES
from jaxis.server.protocol.llama_server import LlamaCompletion, LlamaCompletionRequest

router = APIRouter(route_class=StrictJSONRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/completion", response_model=LlamaCompletion, responses=GENERATION_RESPONSES)
@router.post("/completions", response_model=LlamaCompletion, responses=GENERATION_RESPONSES, include_in_schema=False)
async def complete(body: LlamaCompletionRequest, request: Request, context: Context) -> Response:
    """Continues a prompt; see /v1/completions for all of its parameters."""
    run = LlamaCompletionRun(body, context.model)
    headers = context.ignored_fields.check(body)
    if body.stream:
        return await respond_stream(request, run.stream(context), run, context.config, headers)
    return await respond(request, run.run(context), headers)
