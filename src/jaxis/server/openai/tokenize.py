"""Tokenization without generation: /tokenize, /detokenize (vLLM, llama-server) and llama-server's /apply-template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, model_validator

from jaxis.errors import RequestError
from jaxis.server.context import Context, ServerContext
from jaxis.server.generation.prompts import ChatPrompt, template_variables
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.body import StrictModel, TokenId
from jaxis.server.http.openapi import TEXT_ERRORS
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.openai.chat_job import chat_prompt, template_messages
from jaxis.server.openai.chat_schema import MAX_MESSAGES, ChatCompletionRequest, ChatMessage
from jaxis.server.openai.fields import Tool
from jaxis.tokenizer import Tokenizer

router = APIRouter(route_class=StrictJSONRoute)
MAX_TOKEN_IDS = 2**20


class TokenizeRequest(StrictModel):
    """A string or a conversation to tokenize.

    Attributes:
      prompt, messages, content: Text or conversation; exactly one of the three. `content` is llama-server's name of a
        string.
      add_special_tokens: True adds the beginning-of-sequence token to `prompt`; a template writes its own.
      add_special: True adds the beginning-of-sequence token to `content`; None does not.
      with_pieces: True returns each token of `content` with its text.
      tools, add_generation_prompt, continue_final_message, chat_template_kwargs: Parameters of `messages`, as in a chat
        request.
      return_token_strs: True also returns each token's text.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if sum(value is not None for value in (self.prompt, self.messages, self.content)) != 1:
            raise ValueError("send one of prompt, messages and content")
        if self.with_pieces and self.content is None:
            raise ValueError("with_pieces needs content: send return_token_strs instead")
        return self


class TokenPiece(BaseModel):
    """A token and its text, or its bytes if they are only a part of a character."""

    id: int
    piece: str | list[int]


class TokenizeResponse(BaseModel):
    """Tokens of a string or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_TOKEN_IDS)


class DetokenizeResponse(BaseModel):
    """Text of the tokens, special tokens included."""

    prompt: str


class ApplyTemplateResponse(BaseModel):
    """A conversation as the model reads it."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse, responses=TEXT_ERRORS)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    """Returns the tokens of a string or of a conversation."""
    context.model.check_name(body.model)
    headers = context.ignored_fields.check(body)
    tokenizer = _tokenizer(context)

    def answer() -> str:
        token_ids = _encode(body, tokenizer, context.model)
        texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=context.engine.info.max_model_len,
            tokens=[_piece(token_id, tokenizer) for token_id in token_ids] if body.with_pieces else token_ids,
            token_strs=texts,
        ).model_dump_json()

    return Response(await context.run_in_worker(answer), media_type="application/json", headers=headers)


@router.post("/detokenize", responses=TEXT_ERRORS)
async def detokenize(body: DetokenizeRequest, context: Context) -> DetokenizeResponse:
    """Returns the text of tokens."""
    context.model.check_name(body.model)
    tokenizer = _tokenizer(context)
    text = await context.run_in_worker(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return DetokenizeResponse(prompt=text)


@router.post("/apply-template", responses=TEXT_ERRORS)
async def apply_template(body: ChatCompletionRequest, context: Context, response: Response) -> ApplyTemplateResponse:
    """Returns the prompt of a chat request."""
    context.model.check_name(body.model)
    response.headers.update(context.ignored_fields.check(body))
    tokenizer = _tokenizer(context)
    prompt = chat_prompt(body, context.model)
    return ApplyTemplateResponse(prompt=await context.run_in_worker(lambda: prompt.render(tokenizer)))


def _encode(body: TokenizeRequest, tokenizer: Tokenizer, model: ServedModel) -> list[int]:
    if body.content is not None:
        return tokenizer.encode(body.content, add_special_tokens=bool(body.add_special))
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    prompt = ChatPrompt(
        messages=template_messages(body.messages, model),
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        variables=template_variables(body.chat_template_kwargs, tokenizer),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return list(prompt.tokenize(tokenizer, model.images)[0].token_ids)


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
