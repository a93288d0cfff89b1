"""Facts of the served models, with the keys that clients of OpenAI, Anthropic, vLLM and llama.cpp look for."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, Field

from jaxis.sampling_params import SamplingParams
from jaxis.server.context import Context, ModelEntry, Parts
from jaxis.server.generation.model_info import rfc3339
from jaxis.server.http.body import is_none
from jaxis.server.http.openapi import LOOKUP_ERRORS
from jaxis.server.protocol import Protocol
from jaxis.version import __version__

_SHOWN_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
router = APIRouter()


class ModelMeta(BaseModel):
    """llama-server's figures of a model.

    Attributes:
      n_ctx: Most tokens of a request.
      n_ctx_train: Longest context that the checkpoint claims to support; None if it names none.
      n_vocab: Size of the vocabulary.
      size: Size of the checkpoint's files in bytes.
    """

    n_ctx: int
    n_ctx_train: int | None
    n_params: int
    n_vocab: int
    size: int


class ModelStatus(BaseModel):
    """State of a model's loading, in llama-server's form.

    Attributes:
      value: State: "unloaded", "loading", "loaded" or "unloading".
    """

    value: str


class ModelCard(BaseModel):
    """A name under which a model is served. A model that was never loaded lacks the fields that only its engine knows.

    Attributes:
      type: Anthropic's counterpart of `object`.
      created: Time of the newest change to the checkpoint's files, in Unix seconds; `created_at` is the same in RFC
        3339.
      root: First of the model's names; for an adapter, its folder.
      parent: Model that an adapter changes.
      max_model_len, context_length, max_input_tokens: Most tokens of a request, prompt and answer together, under the
        names of vLLM, OpenRouter and Anthropic.
      max_output_tokens, max_tokens: Most tokens of an answer, under two names.
      input_modalities, output_modalities: Kinds of input and output.
      capabilities: "completion" and, if the model has them, "tools" and "reasoning".
      quantization: Type of most weights, such as "int8"; None if unknown.
      default_parameters: Default sampling parameters.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    owned_by: str = "jaxis"
    root: str
    parent: str | None = Field(default=None, exclude_if=is_none)
    display_name: str
    max_model_len: int | None = Field(default=None, exclude_if=is_none)
    context_length: int | None = Field(default=None, exclude_if=is_none)
    max_input_tokens: int | None = Field(default=None, exclude_if=is_none)
    max_output_tokens: int | None = Field(default=None, exclude_if=is_none)
    max_tokens: int | None = Field(default=None, exclude_if=is_none)
    input_modalities: list[str] = ["text"]
    output_modalities: list[str] = ["text"]
    capabilities: list[str]
    quantization: str | None
    default_parameters: dict[str, float]
    meta: ModelMeta | None = Field(default=None, exclude_if=is_none)
    status: ModelStatus


class ModelList(BaseModel):
    """All names. `has_more`, `first_id` and `last_id` are Anthropic's; there is only one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class GenerationSettings(BaseModel):
    """Length of the context and sampling parameters, for llama-server's clients."""

    n_ctx: int
    params: dict[str, float]


class Modalities(BaseModel):
    """Kinds of input in prompts, in addition to text."""

    vision: bool = False
    audio: Literal[False] = False


class Properties(BaseModel):
    """Answer of /props, in llama-server's form.

    Attributes:
      default_generation_settings: Length of the context, and default sampling parameters.
      total_slots: Most completions that run at once.
      model_alias: First name under which the model is served.
      model_path: Last part of the checkpoint's path; the rest is not revealed.
      chat_template: Source of the chat template; "" if there is none.
      bos_token, eos_token: Texts of the tokens; "" if the tokenizer lacks them.
      build_info: Name and version of the server.
    """

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities = Modalities()
    build_info: str
    is_sleeping: Literal[False] = False


@router.get("/v1/models", responses=LOOKUP_ERRORS)
async def list_models(parts: Parts) -> ModelList:
    """Lists the names of all models, with the state of their loading."""
    cards = [_card(name, entry) for entry in parts.models.entries() for name in entry.names.listed]
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


@router.get("/v1/models/{model:path}", responses=LOOKUP_ERRORS)
async def retrieve_model(model: str, parts: Parts) -> ModelCard:
    """Returns the model with this name."""
    if not model:
        raise HTTPException(404)  # as of an unknown path
    return _card(model, parts.models.entry(model))


@router.get("/props", responses=LOOKUP_ERRORS)
async def properties(context: Context) -> Properties:
    """Returns the server's settings, in llama-server's form."""
    tokenizer = context.model.tokenizer
    special_tokens = tokenizer.special_tokens if tokenizer else {}
    return Properties(
        default_generation_settings=GenerationSettings(
            n_ctx=context.model_info.context_length, params=_default_parameters(context.model.default_sampling_params)
        ),
        total_slots=context.engine.info.max_num_seqs,
        model_alias=context.model.name,
        model_path=context.model_info.file_name,
        chat_template=(tokenizer.default_chat_template if tokenizer else None) or "",
        bos_token=special_tokens.get("bos_token", ""),
        eos_token=special_tokens.get("eos_token", ""),
        modalities=Modalities(vision="image" in context.model_info.input_modalities),
        build_info=f"jaxis {__version__}",
    )


def _card(name: str, entry: ModelEntry) -> ModelCard:
    info, facts, adapter = entry.info, entry.facts, entry.names.adapter(name)
    card = ModelCard(
        id=name,
        created=int(info.modified.timestamp()),
        created_at=rfc3339(info.modified),
        root=entry.names.names[0] if adapter is None else adapter.source,
        parent=None if adapter is None else entry.names.names[0],
        display_name=name,
        input_modalities=list(info.input_modalities),
        capabilities=info.capabilities("reasoning"),
        quantization=info.weight_type or None,
        default_parameters={},
        status=ModelStatus(value=entry.state),
    )
    if facts is None:
        return card
    length = info.context_length
    lengths = ("max_model_len", "context_length", "max_input_tokens", "max_output_tokens", "max_tokens")
    meta = ModelMeta(
        n_ctx=length,
        n_ctx_train=info.trained_len,
        n_params=info.num_parameters,
        n_vocab=facts.vocab_size,
        size=info.file_bytes,
    )
    defaults = _default_parameters(facts.default_sampling_params)
    return card.model_copy(update={**dict.fromkeys(lengths, length), "default_parameters": defaults, "meta": meta})


def _default_parameters(defaults: SamplingParams) -> dict[str, float]:
    return {parameter: getattr(defaults, parameter) for parameter in _SHOWN_DEFAULTS}


PROTOCOL = Protocol(routers=[router])
