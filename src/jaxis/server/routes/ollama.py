"""Ollama's API, as far as a server of one model has it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from starlette.datastructures import MutableHeaders

from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.endpoints.ollama import OllamaRun
from jaxis.server.endpoints.ollama_models import loaded_models, model_entries, shown_model
from jaxis.server.endpoints.ollama_request import ignored_options
from jaxis.server.http.json_body import StrictJSONRoute
from jaxis.server.http.sse import respond, respond_stream
from jaxis.server.protocol.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
)
from jaxis.server.protocol.ollama_models import (
    NDJSON,
    OLLAMA_GENERATION_RESPONSES,
    OLLAMA_LINES,
    OLLAMA_RESPONSES,
    OllamaLoadedModels,
    OllamaModelList,
    OllamaPullRequest,
    OllamaShown,
    OllamaShowRequest,
    OllamaStatus,
    OllamaVersion,
)
from jaxis.version import __version__

OLLAMA_VERSION = "0.33.0"
"""The version of Ollama that this API was compared with."""


class OllamaRoute(StrictJSONRoute):
    """Takes JSON whatever its content type is called, as Ollama does: its manual's curl commands do not say.

    A browser says where a script comes from, and a script of another site may send forms and text without asking, so
    the header counts wherever there is an origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's call."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            headers = MutableHeaders(raw=list(request.headers.raw))
            if "origin" not in headers and "sec-fetch-site" not in headers:
                headers["content-type"] = "application/json"
            return await handler(Request({**request.scope, "headers": headers.raw}, request.receive))

        return handle


router = APIRouter(prefix="/api", route_class=OllamaRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.get("/version", responses=OLLAMA_RESPONSES)
async def version() -> OllamaVersion:
    """The version of Ollama's API, and the server's own."""
    return OllamaVersion(version=OLLAMA_VERSION, jaxis=__version__)


@router.get("/tags", responses=OLLAMA_RESPONSES)
async def list_models(context: Context) -> OllamaModelList:
    """The names under which the model is served."""
    return OllamaModelList(models=model_entries(context))


@router.get("/ps", responses=OLLAMA_RESPONSES)
async def list_loaded_models(context: Context) -> OllamaLoadedModels:
    """The same: the model is always loaded."""
    return OllamaLoadedModels(models=loaded_models(context))


@router.post("/show", responses=OLLAMA_RESPONSES)
async def show(body: OllamaShowRequest, context: Context) -> OllamaShown:
    """Everything about the model."""
    return shown_model(context.model.named(body.asked).name, context)


@router.post("/pull", response_model=OllamaStatus, responses=OLLAMA_RESPONSES | OLLAMA_LINES)
async def pull(body: OllamaPullRequest, context: Context) -> Response:
    """Says that a model is there; another one is not downloaded."""
    context.model.check_name(body.asked)
    success = OllamaStatus(status="success").model_dump_json()
    if body.stream is False:
        return Response(success, media_type="application/json")
    return Response(f"{OllamaStatus(status='pulling manifest').model_dump_json()}\n{success}\n", media_type=NDJSON)


@router.post("/chat", response_model=OllamaChatAnswer, responses=OLLAMA_GENERATION_RESPONSES)
async def chat(body: OllamaChatRequest, request: Request, context: Context) -> Response:
    """Answers a conversation."""
    return await _respond(body, request, context)


@router.post("/generate", response_model=OllamaGenerateAnswer, responses=OLLAMA_GENERATION_RESPONSES)
async def generate(body: OllamaGenerateRequest, request: Request, context: Context) -> Response:
    """Answers a prompt, or continues it."""
    return await _respond(body, request, context)


@router.post("/embed", include_in_schema=False)
@router.post("/embeddings", include_in_schema=False)
async def embed() -> None:
    """Not here."""
    raise HTTPException(501, "this server does not support embeddings")


@router.post("/create", include_in_schema=False)
@router.post("/copy", include_in_schema=False)
@router.post("/push", include_in_schema=False)
@router.delete("/delete", include_in_schema=False)
@router.api_route("/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)
async def manage_models() -> None:
    """Not here."""
    raise HTTPException(501, "this server does not manage models: it serves the one that it was started with")


async def _respond(
    body: OllamaChatRequest | OllamaGenerateRequest, request: Request, context: ServerContext
) -> Response:
    run = OllamaRun(body, context.model)
    headers = context.ignored_fields.check(body, ignored_options(body.options, context.facts.context_length))
    if body.streams:
        return await respond_stream(request, run.stream(context), run, context.config, headers)
    return await respond(request, run.run(context), headers)
