"""OpenAI's endpoints that generate, and the protocol with its other routes."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from jaxis.server.context import Context, check_generates
from jaxis.server.http.openapi import GENERATION_RESPONSES
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.openai import tokenize
from jaxis.server.openai.chat_answer import ChatAnswer
from jaxis.server.openai.chat_job import chat_job
from jaxis.server.openai.chat_schema import ChatCompletionRequest, ChatCompletionResponse
from jaxis.server.openai.completions import (
    CompletionAnswer,
    CompletionRequest,
    CompletionResponse,
    completion_job,
)
from jaxis.server.openai.openai_clients import OPENAI_CLIENTS
from jaxis.server.openai.response_answer import ResponseAnswer
from jaxis.server.openai.response_errors import RESPONSE_ERRORS
from jaxis.server.openai.response_job import left_out, response_job
from jaxis.server.openai.response_schema import ResponseObject, ResponseRequest
from jaxis.server.openai.stored import routes as stored
from jaxis.server.openai.stored.store import Store, attach_store
from jaxis.server.openai.stored.turn import begin_turn
from jaxis.server.protocol import Protocol
from jaxis.server.respond import respond

router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_generates)])


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=GENERATION_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """Answers a conversation."""
    headers = context.ignored_fields.check(body)
    job = chat_job(body, context.model)
    answer = ChatAnswer(body, job)
    return await respond(request, context, job, answer, headers)


@router.post("/v1/completions", response_model=CompletionResponse, responses=GENERATION_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Completes a prompt, or each prompt of a batch."""
    headers = context.ignored_fields.check(body)
    job = completion_job(body, context.model)
    return await respond(request, context, job, CompletionAnswer(body, job), headers)


@router.post("/v1/responses", response_model=ResponseObject, responses=GENERATION_RESPONSES)
async def create_response(body: ResponseRequest, request: Request, context: Context, store: Store) -> Response:
    """Answers a string or a conversation, which may continue a stored one."""
    headers = context.ignored_fields.check(body, left_out(body, context.model))
    turn = await begin_turn(body, store)
    job = response_job(turn.request, context.model)
    return await respond(request, context, job, ResponseAnswer(turn.request, job, turn.record), headers)


PROTOCOL = Protocol(
    routers=[router, stored.router, tokenize.router],
    errors=[RESPONSE_ERRORS],
    clients=OPENAI_CLIENTS,
    attach=attach_store,
)
