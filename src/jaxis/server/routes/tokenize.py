"""Text to tokens and back, without generating."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from jaxis.errors import RequestError
from jaxis.server.endpoints.chat_prompt import request_messages, template_arguments
from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.http.json_body import StrictJSONRoute
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.errors import TEXT_ERRORS
from jaxis.server.protocol.tokenize import (
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenPiece,
)
from jaxis.tokenizer import Tokenizer

router = APIRouter(route_class=StrictJSONRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/tokenize", response_model=TokenizeResponse, responses=TEXT_ERRORS)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    """The tokens of a string or of a conversation."""
    context.model.check_name(body.model)
    headers = context.ignored_fields.check(body)
    tokenizer = _tokenizer(context)

    def answer() -> str:
        token_ids = _encode(body, tokenizer)
        texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=context.engine.info.max_model_len,
            tokens=[_piece(token_id, tokenizer) for token_id in token_ids] if body.with_pieces else token_ids,
            token_strs=texts,
        ).model_dump_json()

    return Response(await context.preprocess(answer), media_type="application/json", headers=headers)


@router.post("/detokenize", responses=TEXT_ERRORS)
async def detokenize(body: DetokenizeRequest, context: Context) -> DetokenizeResponse:
    """The text of tokens."""
    context.model.check_name(body.model)
    tokenizer = _tokenizer(context)
    text = await context.preprocess(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return DetokenizeResponse(prompt=text)


@router.post("/apply-template", responses=TEXT_ERRORS)
async def apply_template(body: ChatCompletionRequest, context: Context, response: Response) -> ApplyTemplateResponse:
    """The prompt of a chat request."""
    context.model.check_name(body.model)
    response.headers.update(context.ignored_fields.check(body))
    tokenizer = _tokenizer(context)
    arguments = template_arguments(body, tokenizer)

    def render() -> str:
        return tokenizer.apply_chat_template(request_messages(body, tokenizer, arguments), **arguments)

    return ApplyTemplateResponse(prompt=await context.preprocess(render))


def _encode(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if body.content is not None:
        return tokenizer.encode(body.content, add_special_tokens=bool(body.add_special))
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    arguments = template_arguments(body, tokenizer)
    return tokenizer.encode_chat(request_messages(body, tokenizer, arguments), **arguments)


def _piece(token_id: int, tokenizer: Tokenizer) -> TokenPiece:
    data = tokenizer.token_bytes(token_id)
    try:
        return TokenPiece(id=token_id, piece=data.decode("utf-8"))
    except UnicodeDecodeError:
        return TokenPiece(id=token_id, piece=list(data))


def _tokenizer(context: ServerContext) -> Tokenizer:
    if context.engine.tokenizer is None:
        raise RequestError("the model has no tokenizer: prompts are token ids")
    return context.engine.tokenizer
