"""/tokenize and /detokenize, as vLLM has them."""

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
      prompt, messages: One of them.
      add_special_tokens: With `prompt`: add the beginning-of-sequence token; a template writes its own.
      tools, add_generation_prompt, continue_final_message, chat_template_kwargs: With `messages`, as in a chat request.
      return_token_strs: Return each token's text too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_TOKEN_IDS)


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str
