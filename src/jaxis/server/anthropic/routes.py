"""Anthropic's endpoints."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Depends, Request, Response

from jaxis.server.anthropic.claude_code import CLAUDE_CODE
from jaxis.server.anthropic.message_answer import MessageAnswer
from jaxis.server.anthropic.message_errors import MESSAGE_ERRORS
from jaxis.server.anthropic.message_job import left_out, message_job
from jaxis.server.anthropic.message_schema import (
    AnswerMessage,
    CountTokensRequest,
    MessageErrorResponse,
    MessagesRequest,
    TokenCount,
)
from jaxis.server.context import Context, ServerContext, check_generates
from jaxis.server.http.openapi import TEXT_ERRORS, error_responses, generation_responses
from jaxis.server.http.sse import respond_whole
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.protocol import Protocol
from jaxis.server.respond import respond

router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_generates)])


@router.post("/v1/messages", response_model=AnswerMessage, responses=generation_responses(MessageErrorResponse))
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answers a conversation, in Anthropic's form."""
    headers = context.ignored_fields.check(body, left_out(body, context.model))
    job = message_job(body, context.model)
    return await respond(request, context, job, MessageAnswer(body, job), headers)


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=error_responses(*TEXT_ERRORS, model=MessageErrorResponse),
)
async def count_message_tokens(body: CountTokensRequest, request: Request, context: Context) -> Response:
    """Returns the length of a conversation's prompt in tokens."""
    headers = context.ignored_fields.check(body, left_out(body, context.model))
    return await respond_whole(request, _count_tokens(body, context), headers)


@router.get("/api/hello", include_in_schema=False)
async def hello() -> Response:
    """Answers Claude Code's HEAD request before its first message."""
    return Response()


async def _count_tokens(request: CountTokensRequest, context: ServerContext) -> TokenCount:
    """Returns the length of a message's prompt. It takes no place in the engine's queue."""
    # Uses the tokenizer without a length limit, so that clients learn how much too long a prompt is.
    job = message_job(request, dataclasses.replace(context.model, tokenizer=context.engine.tokenizer))
    async with context.token_counts:
        [prompt] = await context.run_in_worker(job.tokenize)
    return TokenCount(input_tokens=len(prompt.token_ids))


PROTOCOL = Protocol(
    routers=[router],
    errors=[MESSAGE_ERRORS],
    browser_headers=("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    clients=[CLAUDE_CODE],
)
