"""What the server tells of its model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from jaxis.errors import RequestError
from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.endpoints.model_facts import rfc3339
from jaxis.server.protocol.errors import LOOKUP_ERRORS
from jaxis.server.protocol.models import (
    GenerationSettings,
    ModelCard,
    ModelList,
    ModelMeta,
    Properties,
    TokenizerInfo,
)
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
tokenizer_router = APIRouter()
Context = Annotated[ServerContext, Depends(get_context)]


@router.get("/v1/models", responses=LOOKUP_ERRORS)
async def list_models(context: Context) -> ModelList:
    """The names under which the model is served."""
    names = context.model.names
    return ModelList(data=[_card(name, context) for name in names], first_id=names[0], last_id=names[-1])


@router.get("/v1/models/{model:path}", responses=LOOKUP_ERRORS)
async def retrieve_model(model: str, context: Context) -> ModelCard:
    """One of them."""
    return _card(context.model.named(model).name, context)


@router.get("/props", responses=LOOKUP_ERRORS)
async def properties(context: Context) -> Properties:
    """The server's settings, as llama-server tells them."""
    tokenizer = context.model.tokenizer
    special_tokens = tokenizer.special_tokens if tokenizer else {}
    return Properties(
        default_generation_settings=GenerationSettings(
            n_ctx=context.facts.context_length, params=_default_parameters(context)
        ),
        total_slots=context.engine.info.max_num_seqs,
        model_alias=context.model.name,
        model_path=context.facts.file_name,
        chat_template=(tokenizer.default_chat_template if tokenizer else None) or "",
        bos_token=special_tokens.get("bos_token", ""),
        eos_token=special_tokens.get("eos_token", ""),
        build_info=f"jaxis {__version__}",
    )


@tokenizer_router.get("/tokenizer_info", responses=LOOKUP_ERRORS)
async def tokenizer_info(context: Context) -> TokenizerInfo:
    """What a client needs to render and count prompts by itself."""
    tokenizer = context.model.tokenizer
    if tokenizer is None:
        raise RequestError("the model has no tokenizer: prompts are token ids")
    named = tokenizer.special_tokens
    texts = {token_id: tokenizer.token_text(token_id) for token_id in sorted(tokenizer.special_token_ids)}
    return TokenizerInfo(
        chat_template=tokenizer.default_chat_template,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        additional_special_tokens=[text for text in texts.values() if text not in named.values()],
        model_max_length=context.facts.context_length,
        added_tokens_decoder={token_id: {"content": text, "special": True} for token_id, text in texts.items()},
    )


def _card(name: str, context: ServerContext) -> ModelCard:
    facts = context.facts
    length = facts.context_length
    return ModelCard(
        id=name,
        created=int(facts.modified.timestamp()),
        created_at=rfc3339(facts.modified),
        root=context.model.name,
        display_name=name,
        max_model_len=length,
        context_length=length,
        max_input_tokens=length,
        max_output_tokens=length,
        max_tokens=length,
        capabilities=facts.capabilities("reasoning"),
        quantization=facts.weight_type or None,
        default_parameters=_default_parameters(context),
        meta=ModelMeta(
            n_ctx=length,
            n_ctx_train=facts.trained_len,
            n_params=facts.num_parameters,
            n_vocab=context.engine.info.vocab_size,
            size=facts.file_bytes,
        ),
    )


def _default_parameters(context: ServerContext) -> dict[str, float]:
    defaults = context.engine.info.default_sampling_params
    return {parameter: getattr(defaults, parameter) for parameter in _SHOWN_DEFAULTS}
