"""The tokenizer's settings for clients that render and count prompts themselves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from jaxis.errors import RequestError
from jaxis.server.context import Context
from jaxis.server.http.openapi import LOOKUP_ERRORS
from jaxis.server.protocol import Protocol

router = APIRouter()


class TokenizerInfo(BaseModel):
    """Answer of /tokenizer_info in vLLM's form: settings with which a client can render and count prompts.

    Attributes:
      tokenizer_class: Class of transformers that reads the checkpoint's tokenizer.json.
      chat_template: Source of the default chat template.
      bos_token, eos_token, pad_token, unk_token: Texts of special tokens; None if the tokenizer lacks the token.
      additional_special_tokens: Texts of other special tokens.
      model_max_length: Most tokens of a request.
      added_tokens_decoder: Texts of special tokens by id.
    """

    tokenizer_class: str = "PreTrainedTokenizerFast"
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    model_max_length: int
    added_tokens_decoder: dict[int, dict[str, Any]]


@router.get("/tokenizer_info", responses=LOOKUP_ERRORS)
async def tokenizer_info(context: Context) -> TokenizerInfo:
    """Returns the settings with which a client can render and count prompts."""
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
        model_max_length=context.model_info.context_length,
        added_tokens_decoder={token_id: {"content": text, "special": True} for token_id, text in texts.items()},
    )


PROTOCOL = Protocol(routers=[router], is_on=lambda config: config.tokenizer_info)
