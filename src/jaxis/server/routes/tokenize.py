"""Text to tokens and back, without generating."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from jaxis.errors import RequestError
from jaxis.server.chat_prompt import message_for_template, template_arguments
from jaxis.server.context import ServerContext, get_context
from jaxis.server.protocol.errors import TEXT_ERRORS
from jaxis.server.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from jaxis.tokenizer import Tokenizer

router = APIRouter()
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/tokenize", responses=TEXT_ERRORS)
async def tokenize(body: TokenizeRequest, context: Context) -> TokenizeResponse:
    """The tokens of a text or of a conversation."""
    context.model.check_name(body.model)
    tokenizer = _tokenizer(context)
    token_ids = await context.preprocess(lambda: _encode(body, tokenizer))
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(token_ids), max_model_len=context.engine.max_model_len, tokens=token_ids, token_strs=texts
    )


@router.post("/detokenize", responses=TEXT_ERRORS)
async def detokenize(body: DetokenizeRequest, context: Context) -> DetokenizeResponse:
    """The text of tokens."""
    context.model.check_name(body.model)
    tokenizer = _tokenizer(context)
    text = await context.preprocess(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return DetokenizeResponse(prompt=text)


def _encode(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    messages = [message_for_template(message, tokenizer, f"messages[{i}]") for i, message in enumerate(body.messages)]
    return tokenizer.encode_chat(messages, **template_arguments(body, tokenizer))


def _tokenizer(context: ServerContext) -> Tokenizer:
    if context.engine.tokenizer is None:
        raise RequestError("the model has no tokenizer: prompts are token ids")
    return context.engine.tokenizer
