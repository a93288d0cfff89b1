"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from jaxis.sampling_params import INTEGER_BOUNDS
from jaxis.server.protocol.base import MAX_INT32, Answer, GenerationRequest, TokenId, Usage, bounded, is_none
from jaxis.server.protocol.chat import Prediction
from jaxis.server.protocol.not_applied import NOT_FOR_COMPLETIONS, NotApplied
from jaxis.server.protocol.structured import StructuredFields

MAX_PROMPTS = 4096
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationRequest, StructuredFields):
    """A prompt, or a batch of prompts, to complete.

    Attributes:
      prompt: A string, token ids, or a list of either.
      max_tokens: 0, with `echo`, only reads the prompt; None is 16.
      max_completion_tokens: The same limit by the name that it has in chat: some proxies send both.
      echo: Put the prompt before the completion, in the text and in the log-probabilities.
      logprobs: This many most likely tokens' log-probabilities for each token.
      add_special_tokens: Add the tokenizer's beginning-of-sequence token to a string; only false does not.
      best_of: Only the value of `n`.
      suffix: Not supported.
      prediction: As in a chat request, and for every prompt; OpenAI's completions have none.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = GenerationRequest.not_applied | NOT_FOR_COMPLETIONS

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    max_completion_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    echo: bool | None = None
    logprobs: int | None = bounded(INTEGER_BOUNDS["logprobs"])
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    prediction: Prediction | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The batch, one prompt being a batch of one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return cast("list[str] | list[list[int]]", [self.prompt])  # the first element tells the type of all
        return cast("list[str] | list[list[int]]", self.prompt)


class CompletionLogprobs(BaseModel):
    """Four lists with an entry a token; the first token of a prompt has no log-probability."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(BaseModel):
    """One completion, or what a chunk adds to it; `index` counts through the prompts and their `n` completions."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = Field(default=None, exclude_if=is_none)


class CompletionResponse(Answer):
    """A whole answer, or a chunk of one.

    Attributes:
      kv_transfer_params: See `ChatCompletionResponse`. In a stream, the last chunk of each prompt has them.
    """

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = Field(default=None, exclude_if=is_none)
