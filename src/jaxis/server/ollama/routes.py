"""Ollama's API, as far as a server has it that downloads and makes no models."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders

from jaxis.server.context import ModelEntry, Parts, ServerContext, ServerParts
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.model_info import ServedModelInfo, rfc3339
from jaxis.server.generation.respond import respond
from jaxis.server.http.body import LenientModel, StrictJSONRoute
from jaxis.server.http.openapi import error_response
from jaxis.server.ollama.ollama_answer import NDJSON, OllamaAnswerWriter, empty_answer
from jaxis.server.ollama.ollama_job import chat_job, generate_job, ignored_options
from jaxis.server.ollama.ollama_schema import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    asks_to_unload,
)
from jaxis.version import __version__

# The served model as Ollama describes models.


_NAMES = {"repetition_penalty": "repeat_penalty"}
_NEVER = "2318-01-01T00:00:00Z"
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
    """A name of a loaded model.

    Attributes:
      expires_at: When it is unloaded; never is a year far away, as with Ollama.
      size_vram: Bytes in the memory of accelerators; the engine does not tell.
      context_length: Most tokens of a request.
    """

    expires_at: str
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


def model_entries(entry: ModelEntry) -> list[OllamaModelEntry]:
    """One for each name under which a model is served."""
    info = entry.info
    return [
        OllamaModelEntry(
            name=name,
            model=name,
            modified_at=rfc3339(info.modified),
            size=info.file_bytes,
            digest=info.digest if (adapter := entry.names.adapter(name)) is None else adapter.digest.hex(),
            details=_details(info),
            capabilities=_capabilities(info),
        )
        for name in entry.names.listed
    ]


def loaded_models(entry: ModelEntry) -> list[OllamaLoadedModel]:
    """The same of a loaded model."""
    expires = _NEVER if entry.expires is None else rfc3339(entry.expires)
    more = {"context_length": entry.info.context_length, "expires_at": expires}
    return [OllamaLoadedModel(**dict(named), **more) for named in model_entries(entry)]


def shown_model(name: str, entry: ModelEntry) -> OllamaShown:
    """Everything that is known about a model, under one of its names."""
    info, facts = entry.info, entry.facts
    architecture = info.architecture
    figures: dict[str, Any] = {"general.architecture": architecture, "general.basename": name}
    parameters, template = "", ""
    if facts is not None:
        figures |= {
            "general.parameter_count": info.num_parameters,
            f"{architecture}.context_length": info.context_length,
            f"{architecture}.vocab_size": facts.vocab_size,
        }
        defaults, template = facts.default_sampling_params, facts.chat_template
        parameters = "\n".join(f"{_NAMES.get(name, name)} {getattr(defaults, name)}" for name in _SHOWN_PARAMETERS)
    return OllamaShown(
        parameters=parameters,
        template=template,
        details=_details(info),
        model_info=figures,
        capabilities=_capabilities(info),
        modified_at=rfc3339(info.modified),
    )


def _capabilities(info: ServedModelInfo) -> list[str]:
    sees = "image" in info.input_modalities
    return [*info.capabilities("thinking"), *(["vision"] if sees else [])]


def _details(info: ServedModelInfo) -> OllamaDetails:
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


_ERROR = error_response(OllamaError, description="What went wrong")
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
async def list_models(parts: Parts) -> OllamaModelList:
    """The names under which models are served."""
    return OllamaModelList(models=[named for entry in parts.models.entries() for named in model_entries(entry)])


@router.get("/ps", responses=OLLAMA_RESPONSES)
async def list_loaded_models(parts: Parts) -> OllamaLoadedModels:
    """Those of the models that are loaded."""
    loaded = [entry for entry in parts.models.entries() if entry.context is not None]
    return OllamaLoadedModels(models=[named for entry in loaded for named in loaded_models(entry)])


@router.post("/show", responses=OLLAMA_RESPONSES)
async def show(body: OllamaShowRequest, parts: Parts) -> OllamaShown:
    """Everything that is known about a model."""
    entry = parts.models.entry(body.asked)
    return shown_model(body.asked or entry.names.names[0], entry)


@router.post("/pull", response_model=OllamaStatus, responses=OLLAMA_RESPONSES | OLLAMA_LINES)
async def pull(body: OllamaPullRequest, parts: Parts) -> Response:
    """Says that a model is there; another one is not downloaded."""
    parts.models.entry(body.asked)
    success = OllamaStatus(status="success").model_dump_json()
    if body.stream is False:
        return Response(success, media_type="application/json")
    return Response(f"{OllamaStatus(status='pulling manifest').model_dump_json()}\n{success}\n", media_type=NDJSON)


async def _asked_context(request: Request, parts: Parts) -> ServerContext | None:
    """The model that a request asks for; None if it asks only to unload it."""
    body = await request.json()
    if isinstance(body, dict) and asks_to_unload(body):
        return None
    context = await parts.models.context_of(request)
    _ = context.generator  # a model that makes vectors is refused
    return context


# The context of a request that may have nothing to answer.
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
    """Not here."""
    raise HTTPException(501, "this server does not manage models: it serves those that it was started with")


async def _respond(
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    context: ServerContext,
    job: GenerationJob | None,
) -> Response:
    """The answer; without a job, that there is nothing to answer."""
    headers = context.ignored_fields.check(body, ignored_options(body.options, context.model_info.context_length))
    context.models.keep(context.model.name, body.keep_alive)
    if job is not None:
        return await respond(request, context, job, OllamaAnswerWriter(body, job), headers)
    return _nothing_to_answer(body, context.model.named(body.model).name, "load", headers)


async def _unload(body: OllamaChatRequest | OllamaGenerateRequest, parts: ServerParts) -> Response:
    """Unloads a model, where models can be unloaded; says so in any case, since clients ask for no more."""
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
