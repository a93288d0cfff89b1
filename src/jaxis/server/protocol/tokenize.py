"""/tokenize and /detokenize, as vLLM and llama-server have them; /apply-template, as llama-server has it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from jaxis.server.protocol.base import StrictModel, TokenId
from jaxis.server.protocol.chat import MAX_MESSAGES, ChatMessage
from jaxis.server.protocol.tools import Tool

MAX_TOKEN_IDS = 2**20


class TokenizeRequest(StrictModel):
    """A string, or a conversation.

    Attributes:
      prompt, messages, content: One of them; `content` is llama-server's name of a string.
      add_special_tokens: With `prompt`: add the beginning-of-sequence token; a template writes its own.
      add_special: The same with `content`, but false unless it is asked for.
      with_pieces: With `content`: return each token with its text.
      tools, add_generation_prompt, continue_final_message, chat_template_kwargs: With `messages`, as in a chat request.
      return_token_strs: Return each token's text too.
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
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_TOKEN_IDS)


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str


class ApplyTemplateResponse(BaseModel):
    """A conversation as the model reads it."""

    prompt: str
