"""OpenAI's endpoints that generate."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from jaxis.server.endpoints.chat import ChatCompletion
from jaxis.server.endpoints.completions import TextCompletion
from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.endpoints.responses import ResponseRun
from jaxis.server.http.json_body import StrictJSONRoute
from jaxis.server.http.sse import respond, respond_stream
from jaxis.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from jaxis.server.protocol.completions import CompletionRequest, CompletionResponse
from jaxis.server.protocol.errors import GENERATION_RESPONSES
from jaxis.server.protocol.responses import ResponseObject, ResponseRequest

router = APIRouter(route_class=StrictJSONRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=GENERATION_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """Answers a conversation."""
    return await _respond(ChatCompletion(body, context.model), body, request, context)


@router.post("/v1/completions", response_model=CompletionResponse, responses=GENERATION_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Completes a prompt, or each of a batch."""
    return await _respond(TextCompletion(body, context.model), body, request, context)


@router.post("/v1/responses", response_model=ResponseObject, responses=GENERATION_RESPONSES)
async def create_response(body: ResponseRequest, request: Request, context: Context) -> Response:
    """Answers a string or a conversation; nothing is stored."""
    return await _respond(ResponseRun(body, context.model), body, request, context)


async def _respond(
    work: ChatCompletion | TextCompletion | ResponseRun,
    body: ChatCompletionRequest | CompletionRequest | ResponseRequest,
    request: Request,
    context: ServerContext,
) -> Response:
    left_out = work.left_out if isinstance(work, ResponseRun) else ()
    headers = context.ignored_fields.check(body, left_out)
    if body.stream:
        return await respond_stream(request, work.stream(context), work, context.config, headers)
    return await respond(request, work.run(context), headers)
