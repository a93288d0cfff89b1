"""Ollama's routes about models, and what its answers look like in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxis.server.protocol.base import LenientModel

NDJSON = "application/x-ndjson"


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
