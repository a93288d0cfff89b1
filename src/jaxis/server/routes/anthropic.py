"""Anthropic's endpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.endpoints.messages import MessageRun, count_tokens
from jaxis.server.endpoints.messages_prompt import left_out
from jaxis.server.http.json_body import StrictJSONRoute
from jaxis.server.http.sse import respond, respond_stream
from jaxis.server.protocol.errors import MESSAGE_COUNT_ERRORS, MESSAGE_RESPONSES
from jaxis.server.protocol.messages import CountTokensRequest, MessagesRequest
from jaxis.server.protocol.messages_answer import AnswerMessage, TokenCount

router = APIRouter(route_class=StrictJSONRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/v1/messages", response_model=AnswerMessage, responses=MESSAGE_RESPONSES)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answers a conversation, in Anthropic's shape."""
    headers = context.ignored_fields.check(body, left_out(body, context.model))
    work = MessageRun(body, context.model)
    if body.stream:
        return await respond_stream(request, work.stream(context), work, context.config, headers)
    return await respond(request, work.run(context), headers)


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=MESSAGE_COUNT_ERRORS)
async def count_message_tokens(body: CountTokensRequest, request: Request, context: Context) -> Response:
    """The length of a conversation's prompt in tokens."""
    headers = context.ignored_fields.check(body, left_out(body, context.model))
    return await respond(request, count_tokens(body, context), headers)


@router.get("/api/hello", include_in_schema=False)
async def hello() -> Response:
    """What Claude Code asks before its first request, as HEAD."""
    return Response()
