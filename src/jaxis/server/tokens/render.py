"""vLLM's render endpoints: they return the tokens of a request, as the body of /inference/v1/generate."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.prompt_extension import Conversation, compare_prompts
from jaxis.sampling_params import SamplingParams
from jaxis.server.generation.images import has_images
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.prompts import ChatPrompt
from jaxis.server.http.body import TokenId, is_none
from jaxis.server.openai.chat_schema import ChatCompletionRequest
from jaxis.server.openai.tokenize import MAX_TOKEN_IDS
from jaxis.server.tokens.vllm_generate import TokenSamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.vision.prompt_images import NoImages


class ChatRenderRequest(ChatCompletionRequest):
    """A conversation to render.

    Attributes:
      previous_token_ids: Tokens of an earlier prompt and its answer, which this prompt should extend; vLLM has no such
        field.
    """

    previous_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)] | None = None


class Extension(BaseModel):
    """Result of comparing a prompt with an earlier one; see `PromptExtension`."""

    extends: bool
    num_common_tokens: int
    token_id: int | None
    previous_token_id: int | None
    message_index: int | None


class RenderedRequest(BaseModel):
    """The body of a request to /inference/v1/generate.

    Attributes:
      sampling_params: Parameters that differ from vLLM's defaults.
      extension: Comparison with `previous_token_ids`, if the request sends them.
    """

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None = Field(default=None, exclude_if=is_none)
    priority: int
    extension: Extension | None = Field(default=None, exclude_if=is_none)


def rendered_requests(job: GenerationJob) -> list[RenderedRequest]:
    """Renders and tokenizes a job's prompts, and returns them with everything that an answer depends on.

    Raises:
      RequestError: The job has a grammar or images, which a request of token ids cannot express.
    """
    if job.answer.grammar is not None:
        raise RequestError(
            "is no part of a rendered prompt: leave it out, and send structured_outputs with the tokens",
            param=job.answer.grammar.field,
        )
    if isinstance(job.prompts, ChatPrompt) and has_images(job.prompts.messages):
        raise RequestError(
            "has images, which are no part of a rendered prompt: send it to /v1/chat/completions", param="messages"
        )
    return [
        RenderedRequest(
            request_id=job.request_id if job.prompts.num_prompts == 1 else f"{job.request_id}-{index}",
            token_ids=list(prompt.token_ids),
            sampling_params=_given(job.params),
            model=job.model.name,
            stream=job.stream,
            cache_salt=prompt.cache_salt,
            priority=job.priority,
        )
        for index, prompt in enumerate(job.tokenize())
    ]


def chat_extension(
    token_ids: list[int], previous_token_ids: list[int], prompt: ChatPrompt, tokenizer: Tokenizer | None
) -> Extension:
    """Compares the tokens of a conversation with those of an earlier one."""

    def tokenize(messages: Conversation) -> list[int]:
        part = dataclasses.replace(prompt, messages=messages, add_generation_prompt=False, continue_final_message=False)
        [tokenized] = part.tokenize(tokenizer, NoImages())  # rendered prompts have no images
        return list(tokenized.token_ids)

    found = compare_prompts(token_ids, previous_token_ids, prompt.messages, tokenize, has_tools=bool(prompt.tools))
    return Extension(**dataclasses.asdict(found))


def _given(params: SamplingParams) -> dict[str, Any]:
    values = {name: getattr(params, name) for name in TokenSamplingParams.model_fields if name != "structured_outputs"}
    default = SamplingParams(max_tokens=None)
    given = {name: value for name, value in values.items() if value != getattr(default, name)}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in given["logit_bias"].items()}
    return given
