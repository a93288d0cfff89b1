"""Ollama's endpoints, without those that download and make models."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders

from jaxis.server.context import Parts, ServerContext, ServerParts
from jaxis.server.generation.job import GenerationJob
from jaxis.server.http.openapi import error_response
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.ollama.ollama_answer import OllamaAnswerWriter, empty_answer
from jaxis.server.ollama.ollama_errors import NDJSON, OLLAMA_ERRORS
from jaxis.server.ollama.ollama_job import chat_job, generate_job, ignored_options
from jaxis.server.ollama.ollama_models import (
    OllamaLoadedModels,
    OllamaModelList,
    OllamaPullRequest,
    OllamaShown,
    OllamaShowRequest,
    OllamaStatus,
    OllamaVersion,
    loaded_models,
    model_entries,
    shown_model,
)
from jaxis.server.ollama.ollama_schema import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    asks_to_unload,
)
from jaxis.server.protocol import Protocol
from jaxis.server.respond import respond
from jaxis.version import __version__

OLLAMA_VERSION = "0.33.0"
"""Version of Ollama with which this API was compared."""


class OllamaError(BaseModel):
    error: str


_ERROR = error_response(OllamaError, description="What went wrong")
_STATUSES = (400, 401, 404, 408, 413, "default")
OLLAMA_RESPONSES: dict[int | str, dict[str, Any]] = dict.fromkeys(_STATUSES, _ERROR)
OLLAMA_LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; unless `stream` is false, a part of it a line", "content": {NDJSON: {}}},
}
OLLAMA_GENERATION_RESPONSES = dict.fromkeys((*_STATUSES, 429, 500, 503, 504), _ERROR) | OLLAMA_LINES


class OllamaRoute(StrictJSONRoute):
    """Reads JSON of any content type, as Ollama does, since its manual's curl commands name none.

    A script of another site may send forms and text without the browser asking first. The content type therefore still
    counts for requests with an origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            headers = MutableHeaders(raw=list(request.headers.raw))
            if "origin" not in headers and "sec-fetch-site" not in headers:
                headers["content-type"] = "application/json"
            return await handler(Request({**request.scope, "headers": headers.raw}, request.receive))

        return handle


router = APIRouter(prefix="/api", route_class=OllamaRoute)


@router.get("/version", responses=OLLAMA_RESPONSES)
async def version() -> OllamaVersion:
    """Returns the versions of Ollama's API and of the server."""
    return OllamaVersion(version=OLLAMA_VERSION, jaxis=__version__)


@router.get("/tags", responses=OLLAMA_RESPONSES)
async def list_models(parts: Parts) -> OllamaModelList:
    """Returns the names under which models are served."""
    return OllamaModelList(models=[named for entry in parts.models.entries() for named in model_entries(entry)])


@router.get("/ps", responses=OLLAMA_RESPONSES)
async def list_loaded_models(parts: Parts) -> OllamaLoadedModels:
    """Returns the names of loaded models."""
    loaded = [entry for entry in parts.models.entries() if entry.context is not None]
    return OllamaLoadedModels(models=[named for entry in loaded for named in loaded_models(entry)])


@router.post("/show", responses=OLLAMA_RESPONSES)
async def show(body: OllamaShowRequest, parts: Parts) -> OllamaShown:
    """Returns all known facts of a model."""
    entry = parts.models.entry(body.asked)
    return shown_model(body.asked or entry.names.names[0], entry)


@router.post("/pull", response_model=OllamaStatus, responses=OLLAMA_RESPONSES | OLLAMA_LINES)
async def pull(body: OllamaPullRequest, parts: Parts) -> Response:
    """Reports success if the model is served; other models are not downloaded."""
    parts.models.entry(body.asked)
    success = OllamaStatus(status="success").model_dump_json()
    if body.stream is False:
        return Response(success, media_type="application/json")
    return Response(f"{OllamaStatus(status='pulling manifest').model_dump_json()}\n{success}\n", media_type=NDJSON)


async def _asked_context(request: Request, parts: Parts) -> ServerContext | None:
    """Returns the context of the requested model; None if the request only unloads it."""
    body = await request.json()
    if isinstance(body, dict) and asks_to_unload(body):
        return None
    context = await parts.models.context_of(request)
    _ = context.generator  # a model that makes vectors is refused
    return context


# Context of a request that may have no prompt.
AskedContext = Annotated[ServerContext | None, Depends(_asked_context)]


@router.post("/chat", response_model=OllamaChatAnswer, responses=OLLAMA_GENERATION_RESPONSES)
async def chat(body: OllamaChatRequest, request: Request, parts: Parts, context: AskedContext) -> Response:
    """Answers a conversation."""
    if context is None:
        return await _unload(body, parts)
    job = chat_job(body, context.model) if body.messages else None
    return await _respond(body, request, context, job)


@router.post("/generate", response_model=OllamaGenerateAnswer, responses=OLLAMA_GENERATION_RESPONSES)
async def generate(body: OllamaGenerateRequest, request: Request, parts: Parts, context: AskedContext) -> Response:
    """Answers a prompt, or continues it."""
    if context is None:
        return await _unload(body, parts)
    job = generate_job(body, context.model) if body.prompt else None
    return await _respond(body, request, context, job)


@router.post("/create", include_in_schema=False)
@router.post("/copy", include_in_schema=False)
@router.post("/push", include_in_schema=False)
@router.delete("/delete", include_in_schema=False)
@router.api_route("/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)
async def manage_models() -> None:
    """Refuses to manage models."""
    raise HTTPException(501, "this server does not manage models: it serves those that it was started with")


async def _respond(
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    context: ServerContext,
    job: GenerationJob | None,
) -> Response:
    """Returns the answer of a job; without a job, an answer to a request without a prompt."""
    headers = context.ignored_fields.check(body, ignored_options(body.options, context.model_info.context_length))
    context.models.keep(context.model.name, body.keep_alive)
    if job is not None:
        return await respond(request, context, job, OllamaAnswerWriter(body, job), headers)
    return _nothing_to_answer(body, context.model.named(body.model).name, "load", headers)


async def _unload(body: OllamaChatRequest | OllamaGenerateRequest, parts: ServerParts) -> Response:
    """Unloads a model if possible. It reports success in any case, since clients expect nothing else."""
    name = body.model or parts.models.entry(None).names.names[0]
    headers = parts.ignored_fields.check(body)
    await parts.models.unload(name)
    return _nothing_to_answer(body, name, "unload", headers)


def _nothing_to_answer(
    body: OllamaChatRequest | OllamaGenerateRequest,
    name: str,
    reason: Literal["load", "unload"],
    headers: Mapping[str, str],
) -> Response:
    answer = empty_answer(body, name, reason).model_dump_json()
    if body.streams:
        return Response(f"{answer}\n", media_type=NDJSON, headers=headers)
    return Response(answer, media_type="application/json", headers=headers)


PROTOCOL = Protocol(
    routers=[router],
    is_on=lambda config: config.ollama_api,
    errors=[OLLAMA_ERRORS],
    greeting="Ollama is running",
)
