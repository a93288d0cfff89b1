"""Endpoints that take or return tokens: generation and rendering, as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from pydantic import TypeAdapter

from jaxis.errors import RequestError
from jaxis.server.context import Context, check_generates
from jaxis.server.generation.prompts import ChatPrompt
from jaxis.server.http.openapi import GENERATION_RESPONSES, TEXT_ERRORS
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.openai.chat_job import chat_job
from jaxis.server.openai.completions import CompletionRequest, completion_job
from jaxis.server.protocol import Protocol
from jaxis.server.respond import respond
from jaxis.server.tokens.render import ChatRenderRequest, RenderedRequest, chat_extension, rendered_requests
from jaxis.server.tokens.vllm_generate import (
    GENERATE_ERRORS,
    GenerateAnswer,
    GenerateRequest,
    GenerateResponse,
    generate_job,
)

router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_generates)])
_REQUESTS = TypeAdapter(list[RenderedRequest])


@router.post("/inference/v1/generate", response_model=GenerateResponse, responses=GENERATION_RESPONSES)
async def generate(body: GenerateRequest, request: Request, context: Context) -> Response:
    """Continues token ids with token ids, as vLLM does."""
    headers = context.ignored_fields.check(body)
    vocab_size, highest = context.engine.info.vocab_size, max(body.token_ids)
    if highest >= vocab_size:
        raise RequestError(f"holds {highest}; the model's token ids are 0 to {vocab_size - 1}", param="token_ids")
    job = generate_job(body, context.model)
    return await respond(request, context, job, GenerateAnswer(body, job), headers)


@router.post("/v1/chat/completions/render", response_model=RenderedRequest, responses=TEXT_ERRORS)
async def render_chat(body: ChatRenderRequest, context: Context) -> Response:
    """Returns the tokens of a conversation, and a comparison with earlier tokens if they are sent."""
    headers = context.ignored_fields.check(body)
    job = chat_job(body, context.model)

    def rendered() -> str:
        [request] = rendered_requests(job)
        if body.previous_token_ids is not None and isinstance(job.prompts, ChatPrompt):
            tokenizer = context.model.tokenizer
            request.extension = chat_extension(request.token_ids, body.previous_token_ids, job.prompts, tokenizer)
        return request.model_dump_json()

    return Response(await context.run_in_worker(rendered), media_type="application/json", headers=headers)


@router.post("/v1/completions/render", response_model=list[RenderedRequest], responses=TEXT_ERRORS)
async def render_completion(body: CompletionRequest, context: Context) -> Response:
    """Returns the tokens of each prompt of a completion."""
    headers = context.ignored_fields.check(body)
    job = completion_job(body, context.model)
    rendered = await context.run_in_worker(lambda: _REQUESTS.dump_json(rendered_requests(job)))
    return Response(rendered, media_type="application/json", headers=headers)


PROTOCOL = Protocol(routers=[router], errors=[GENERATE_ERRORS])
