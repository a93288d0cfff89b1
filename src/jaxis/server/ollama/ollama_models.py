"""Ollama's descriptions of the served models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxis.server.context import ModelEntry
from jaxis.server.generation.model_info import ServedModelInfo, rfc3339
from jaxis.server.http.body import LenientModel

_NAMES = {"repetition_penalty": "repeat_penalty"}
_NEVER = "2318-01-01T00:00:00Z"
_SHOWN_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class OllamaVersion(BaseModel):
    """Answer of /api/version.

    Attributes:
      version: Version of Ollama whose API this is; clients refuse older ones.
    """

    version: str
    jaxis: str


class OllamaDetails(BaseModel):
    """Properties of a model.

    Attributes:
      format: "safetensors" or "gguf".
      family: `model_type` of config.json.
      parameter_size: Number of parameters, such as "7.6B".
      quantization_level: Type of most weights, such as "int8".
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
    """A name under which a model is served.

    Attributes:
      modified_at: Time of the newest change to the checkpoint's files, in RFC 3339.
      size: Size of the files in bytes.
      digest: Identifier of the checkpoint; not a digest of the weights.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaModelList(BaseModel):
    """Answer of /api/tags."""

    models: list[OllamaModelEntry]


class OllamaLoadedModel(OllamaModelEntry):
    """A name of a loaded model.

    Attributes:
      expires_at: Time at which it is unloaded; "never" is a distant year, as in Ollama.
      size_vram: Memory on accelerators, which the engine does not report.
      context_length: Most tokens of a request.
    """

    expires_at: str
    size_vram: int = 0
    context_length: int


class OllamaLoadedModels(BaseModel):
    """Answer of /api/ps."""

    models: list[OllamaLoadedModel]


class OllamaModelRequest(LenientModel):
    """Name of a model, under either of two keys."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str | None:
        return self.model or self.name


class OllamaShowRequest(OllamaModelRequest):
    """Request of /api/show. `verbose` has no effect: the vocabulary is not listed."""

    verbose: bool | None = None


class OllamaPullRequest(OllamaModelRequest):
    """Request of /api/pull.

    Attributes:
      stream: True or None streams the answer.
    """

    stream: bool | None = None
    insecure: bool | None = None


class OllamaShown(BaseModel):
    """Answer of /api/show.

    Attributes:
      parameters: Default sampling parameters, one per line.
      template: Source of the chat template, in Jinja (Ollama's templates are in Go).
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
    """A line of /api/pull's answer."""

    status: str


def model_entries(entry: ModelEntry) -> list[OllamaModelEntry]:
    """Returns an entry for each name under which a model is served."""
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
    """Returns an entry for each name of a loaded model."""
    expires = _NEVER if entry.expires is None else rfc3339(entry.expires)
    more = {"context_length": entry.info.context_length, "expires_at": expires}
    return [OllamaLoadedModel(**dict(named), **more) for named in model_entries(entry)]


def shown_model(name: str, entry: ModelEntry) -> OllamaShown:
    """Returns all known facts of a model, under one of its names."""
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
