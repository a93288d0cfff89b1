"""/v1/chat/completions: from a conversation to its answer, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jaxis.engine.output_stream import merge_outputs
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.prompts import TokenizedPrompt, tokenize_chat
from jaxis.server.context import ServerContext
from jaxis.server.errors import ParameterError
from jaxis.server.generation import GenerationJob, generate
from jaxis.server.logprobs import LogprobFormatter
from jaxis.server.protocol.base import new_id
from jaxis.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from jaxis.server.protocol.tokenize import TokenizeRequest
from jaxis.server.sampling import chat_sampling_params, check_stream_options
from jaxis.server.sse import DONE, sse_event
from jaxis.server.usage import UsageCounter
from jaxis.tokenizer import Tokenizer

# What the request says elsewhere, or must not say: a template is code.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "tokenizer", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


class ChatCompletion:
    """One chat request, checked and ready to run.

    Attributes:
      job: What it wants generated.

    Raises:
      RequestError: A field cannot be honoured.
    """

    def __init__(self, request: ChatCompletionRequest, context: ServerContext) -> None:
        context.check_model(request.model)
        check_stream_options(request)
        if request.echo and not request.continue_final_message:
            raise ParameterError("echo", "echo needs continue_final_message=true: add it, or leave echo out")
        tokenizer = context.engine.tokenizer
        params = chat_sampling_params(request, context.engine.default_sampling_params)
        self._request = request
        self._context = context
        self._num_top = request.top_logprobs or 0
        self._formatter = LogprobFormatter(tokenizer, bool(request.return_tokens_as_token_ids))
        self._prefix = _text(request.messages[-1]) if request.echo else ""
        self.job = GenerationJob(
            request_id=new_id("chatcmpl"),
            num_prompts=1,
            preprocess=functools.partial(_preprocess, request, tokenizer, template_arguments(request, tokenizer)),
            params=params,
            priority=request.priority,
            stream=bool(request.stream),
        )

    async def run(self) -> ChatCompletionResponse:
        """The whole answer."""
        usage = UsageCounter()
        outputs: list[RequestOutput] = []
        async with aclosing(generate(self._context, self.job)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                usage.add(prompt_output)
                outputs.append(prompt_output[1])
        output = merge_outputs(outputs)
        return ChatCompletionResponse(
            id=self.job.request_id,
            model=self._context.model_name,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=usage.usage(),
            prompt_logprobs=output.prompt_logprobs and self._formatter.prompt(output.prompt_logprobs),
        )

    async def stream(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        options = self._request.stream_options
        usage = UsageCounter()
        begun: set[int] = set()
        async with aclosing(generate(self._context, self.job)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                usage.add(prompt_output)
                so_far = usage.usage() if options and options.continuous_usage_stats else None
                for completion in prompt_output[1].outputs:
                    if completion.index not in begun:
                        begun.add(completion.index)
                        first = ChatDelta(role="assistant", content=self._prefix)
                        yield self._event([ChatChunkChoice(index=completion.index, delta=first)], usage=so_far)
                    if completion.text or completion.logprobs or completion.finished:
                        yield self._event([self._chunk_choice(completion)], usage=so_far)
        if options and options.include_usage:
            yield self._event([], usage=usage.usage())
        yield DONE

    def _event(self, choices: list[ChatChunkChoice], **more: Any) -> str:
        return sse_event(
            ChatCompletionChunk(id=self.job.request_id, model=self._context.model_name, choices=choices, **more)
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=AssistantMessage(content=self._prefix + completion.text),
            logprobs=self._logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _chunk_choice(self, completion: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=completion.index,
            delta=ChatDelta(content=completion.text or None),
            logprobs=self._logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        return self._formatter.chat(completion.logprobs, self._num_top)


def template_arguments(request: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Arguments of `Tokenizer.apply_chat_template`.

    Raises:
      ParameterError: chat_template_kwargs holds a name that is not the template's.
    """
    kwargs = request.chat_template_kwargs or {}
    reserved = _RESERVED_TEMPLATE_KWARGS | set(tokenizer.special_tokens if tokenizer else ())
    if refused := sorted(reserved & set(kwargs)):
        raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must not set {refused[0]!r}: leave it out")
    generation_prompt = request.add_generation_prompt
    return {
        **kwargs,
        "add_generation_prompt": not request.continue_final_message if generation_prompt is None else generation_prompt,
        "continue_final_message": request.continue_final_message,
    }


def _preprocess(
    request: ChatCompletionRequest, tokenizer: Tokenizer | None, template: dict[str, Any]
) -> list[TokenizedPrompt]:
    prompt = tokenize_chat(
        [message_for_template(message, tokenizer) for message in request.messages], tokenizer, **template
    )
    return [TokenizedPrompt(prompt.text, prompt.token_ids, request.cache_salt)]


def message_for_template(message: ChatMessage, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The message for the template: only what was sent, its parts as one text, and a role that the template knows."""
    fields = message.model_dump(exclude_none=True, exclude={"annotations", "content"})
    if message.content is not None:
        fields["content"] = _text(message)  # which every template takes; few take parts
    templates = tokenizer.chat_templates.values() if tokenizer else ()
    if message.role == "developer" and not any("developer" in template for template in templates):
        fields["role"] = "system"  # what OpenAI's newer name stands for
    return fields


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or ""
