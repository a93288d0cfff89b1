"""Ollama's API, as far as a server of one model has it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders

from jaxis.server.context import Context, ServerContext
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.model_info import rfc3339
from jaxis.server.generation.respond import respond
from jaxis.server.http.body import LenientModel, StrictJSONRoute
from jaxis.server.ollama.ollama_answer import NDJSON, OllamaAnswerWriter, empty_answer
from jaxis.server.ollama.ollama_job import chat_job, generate_job, ignored_options
from jaxis.server.ollama.ollama_schema import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
)
from jaxis.version import __version__

# The served model as Ollama describes models.


_NAMES = {"repetition_penalty": "repeat_penalty"}
_SHOWN_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class OllamaVersion(BaseModel):
    """/api/version.

    Attributes:
      version: The version of Ollama whose API this is: clients refuse an older one.
      jaxis: This server's own.
    """

    version: str
    jaxis: str


class OllamaDetails(BaseModel):
    """What a model is.

    Attributes:
      format: "safetensors" or "gguf".
      family: `model_type` of config.json.
      parameter_size: The number of parameters, such as "7.6B".
      quantization_level: How most of the weights are stored, such as "int8".
      context_length: Most tokens of a request, prompt and answer together.
    """

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int


class OllamaModelEntry(BaseModel):
    """A name under which the model is served.

    Attributes:
      modified_at: When the checkpoint's files were last changed, RFC 3339.
      size: Their bytes.
      digest: Tells checkpoints apart; not a digest of the weights.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaModelList(BaseModel):
    """/api/tags."""

    models: list[OllamaModelEntry]


class OllamaLoadedModel(OllamaModelEntry):
    """A name of the loaded model.

    Attributes:
      expires_at: When it is unloaded: never, for which Ollama too writes a year far away.
      size_vram: Bytes in the memory of accelerators; the engine does not tell.
      context_length: Most tokens of a request.
    """

    expires_at: str = "2318-01-01T00:00:00Z"
    size_vram: int = 0
    context_length: int


class OllamaLoadedModels(BaseModel):
    """/api/ps."""

    models: list[OllamaLoadedModel]


class OllamaModelRequest(LenientModel):
    """Names a model, under either of two keys."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str | None:
        """The name."""
        return self.model or self.name


class OllamaShowRequest(OllamaModelRequest):
    """/api/show. `verbose` has no effect: the vocabulary is not listed."""

    verbose: bool | None = None


class OllamaPullRequest(OllamaModelRequest):
    """/api/pull.

    Attributes:
      stream: None streams.
    """

    stream: bool | None = None
    insecure: bool | None = None


class OllamaShown(BaseModel):
    """/api/show's answer.

    Attributes:
      parameters: Sampling parameters of a request that leaves them out, one a line.
      template: Source of the chat template, which is Jinja and not Go as Ollama's.
      model_info: Figures under GGUF's names.
    """

    modelfile: str = ""
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(BaseModel):
    """A line of /api/pull."""

    status: str


def model_entries(context: ServerContext) -> list[OllamaModelEntry]:
    """One for each name under which the model is served."""
    info = context.model_info
    return [
        OllamaModelEntry(
            name=name,
            model=name,
            modified_at=rfc3339(info.modified),
            size=info.file_bytes,
            digest=info.digest,
            details=_details(context),
            capabilities=info.capabilities("thinking"),
        )
        for name in context.model.names
    ]


def loaded_models(context: ServerContext) -> list[OllamaLoadedModel]:
    """The same: the model is always loaded."""
    length = context.model_info.context_length
    return [OllamaLoadedModel(**dict(entry), context_length=length) for entry in model_entries(context)]


def shown_model(name: str, context: ServerContext) -> OllamaShown:
    """Everything about the model under one of its names."""
    info, tokenizer = context.model_info, context.model.tokenizer
    architecture = info.architecture
    figures = {
        "general.architecture": architecture,
        "general.basename": name,
        "general.parameter_count": info.num_parameters,
        f"{architecture}.context_length": info.context_length,
        f"{architecture}.vocab_size": context.engine.info.vocab_size,
    }
    defaults = context.model.default_sampling_params
    parameters = [f"{_NAMES.get(name, name)} {getattr(defaults, name)}" for name in _SHOWN_PARAMETERS]
    return OllamaShown(
        parameters="\n".join(parameters),
        template=(tokenizer.default_chat_template if tokenizer else None) or "",
        details=_details(context),
        model_info=figures,
        capabilities=info.capabilities("thinking"),
        modified_at=rfc3339(info.modified),
    )


def _details(context: ServerContext) -> OllamaDetails:
    info = context.model_info
    return OllamaDetails(
        format=info.file_format,
        family=info.architecture,
        families=[info.architecture],
        parameter_size=info.parameter_size,
        quantization_level=info.weight_type or "unknown",
        context_length=info.context_length,
    )


OLLAMA_VERSION = "0.33.0"
"""The version of Ollama that this API was compared with."""


class OllamaError(BaseModel):
    """What went wrong."""

    error: str


_ERROR: dict[str, Any] = {"model": OllamaError, "description": "What went wrong"}
_STATUSES = (400, 401, 404, 408, 413, "default")
OLLAMA_RESPONSES: dict[int | str, dict[str, Any]] = dict.fromkeys(_STATUSES, _ERROR)
OLLAMA_LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; unless `stream` is false, a part of it a line", "content": {NDJSON: {}}},
}
OLLAMA_GENERATION_RESPONSES = dict.fromkeys((*_STATUSES, 429, 500, 503, 504), _ERROR) | OLLAMA_LINES


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
    job = chat_job(body, context.model) if body.messages else None
    return await _respond(body, request, context, job)


@router.post("/generate", response_model=OllamaGenerateAnswer, responses=OLLAMA_GENERATION_RESPONSES)
async def generate(body: OllamaGenerateRequest, request: Request, context: Context) -> Response:
    """Answers a prompt, or continues it."""
    job = generate_job(body, context.model) if body.prompt else None
    return await _respond(body, request, context, job)


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
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    context: ServerContext,
    job: GenerationJob | None,
) -> Response:
    """The answer; without a job, that there is nothing to answer."""
    headers = context.ignored_fields.check(body, ignored_options(body.options, context.model_info.context_length))
    if job is not None:
        return await respond(request, context, job, OllamaAnswerWriter(body, job), headers)
    answer = empty_answer(body, context.model.named(body.model).name).model_dump_json()
    if body.streams:
        return Response(f"{answer}\n", media_type=NDJSON, headers=headers)
    return Response(answer, media_type="application/json", headers=headers)
