"""OpenAI's endpoints."""

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
from jaxis.server.protocol.errors import GENERATION_RESPONSES, LOOKUP_ERRORS
from jaxis.server.protocol.models import ModelCard, ModelList
from jaxis.server.protocol.responses import ResponseObject, ResponseRequest

_SHOWN_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
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


@router.get("/v1/models", responses=LOOKUP_ERRORS)
async def list_models(context: Context) -> ModelList:
    """The names under which the model is served."""
    return ModelList(data=[_card(name, context) for name in context.model.names])


@router.get("/v1/models/{model:path}", responses=LOOKUP_ERRORS)
async def retrieve_model(model: str, context: Context) -> ModelCard:
    """One of them."""
    context.model.check_name(model)
    return _card(model, context)


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


def _card(name: str, context: ServerContext) -> ModelCard:
    defaults = context.engine.info.default_sampling_params
    return ModelCard(
        id=name,
        root=context.model.name,
        max_model_len=context.engine.info.max_model_len,
        default_parameters={parameter: getattr(defaults, parameter) for parameter in _SHOWN_DEFAULTS},
    )
