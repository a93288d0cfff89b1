"""Converts requests of Ollama's API to those of the core."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxis.server.endpoints.chat_prompt import reads_reasoning_effort, thinking_variables
from jaxis.server.endpoints.renamed_fields import renamed_fields
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.base import MAX_INT32
from jaxis.server.protocol.chat import ChatCompletionRequest, ChatMessage
from jaxis.server.protocol.completions import CompletionRequest
from jaxis.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    OllamaTool,
)
from jaxis.server.protocol.tools import ChatToolCall, FunctionCall, FunctionDefinition, Tool

_logger = logging.getLogger(__name__)
_SAME_NAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
# The core's names -> Ollama's, for errors; longer names first.
_NAMES = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
}


def chat_request(request: OllamaChatRequest, model: ServedModel) -> ChatCompletionRequest:
    """The same request of /v1/chat/completions; an answer that has begun goes on, as with Ollama.

    Raises:
      RequestError: The model does not reason, and is asked to.
    """
    messages = _messages(request.messages or [])
    last = messages[-1]
    goes_on = last.role == "assistant" and bool(last.content) and not last.tool_calls
    return _chat_request(request, messages, model, tools=_tools(request.tools), continue_final_message=goes_on)


def prompt_request(request: OllamaGenerateRequest, model: ServedModel) -> ChatCompletionRequest | CompletionRequest:
    """The same request of /v1/chat/completions, or of /v1/completions if the prompt is to be continued as it is.

    Raises:
      RequestError: The model does not reason, and is asked to; or a system message goes with a prompt that no template
        renders.
    """
    has_template = model.tokenizer is not None and model.tokenizer.has_chat_template
    if has_template and not request.raw:
        messages = [ChatMessage(role="system", content=request.system)] if request.system else []
        return _chat_request(request, [*messages, ChatMessage(role="user", content=request.prompt)], model)
    if request.system:
        why = "raw=true takes the prompt as it is" if has_template else "the model has no chat template"
        raise ParameterError("system", f"system cannot be honoured: {why}: put it into the prompt")
    if request.think:
        raise ParameterError("think", "think cannot be honoured without a chat template: leave it out")
    fields = _shared_fields(request)
    # The core's own limit for completions is 16 tokens; this one is past the end of any context.
    fields["max_tokens"] = fields["max_tokens"] or MAX_INT32
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return CompletionRequest(prompt=request.prompt or "", logprobs=logprobs, **fields)


def ignored_options(options: OllamaOptions | None, max_model_len: int) -> list[str]:
    """num_ctx, if it asks for a longer context than there is; the log says so once."""
    if options is None or options.num_ctx is None or options.num_ctx <= max_model_len:
        return []
    _log_num_ctx(options.num_ctx, max_model_len)
    return ["options.num_ctx"]


@functools.lru_cache(maxsize=64)
def _log_num_ctx(num_ctx: int, max_model_len: int) -> None:
    _logger.info(
        "a request asks for num_ctx=%d, and the context is %d tokens long: start with a larger --max-model-len",
        num_ctx,
        max_model_len,
    )


@contextmanager
def own_names(model: str) -> Iterator[None]:
    """Translates errors about the core's request to Ollama's names and, where clients look for them, words."""
    try:
        with renamed_fields(_NAMES):
            yield
    except ParameterError as error:
        if error.param != "tools":
            raise
        raise ParameterError("tools", f"{model!r} does not support tools: {error}") from None


def _chat_request(
    request: OllamaRequest, messages: list[ChatMessage], model: ServedModel, **more: Any
) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        messages=messages,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        **_shared_fields(request),
        **_thinking(request.think, model),
        **more,
    )


def _shared_fields(request: OllamaRequest) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME_NAME}
    if isinstance(request.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.format}}
    elif request.format:
        fields["response_format"] = {"type": "json_object"}
    return fields | {
        "stream": request.streams,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
        "repetition_penalty": None if options.repeat_last_n == 0 else options.repeat_penalty,
    }


def _thinking(think: bool | str | None, model: ServedModel) -> dict[str, Any]:
    """Fields of a chat request that make the model reason, or not.

    Raises:
      ParameterError: The model does not reason, and is asked to.
    """
    if think is None:
        return {}
    variables = thinking_variables(bool(think), model.tokenizer)
    switch = {"chat_template_kwargs": variables} if variables else {}
    if think is False:
        return {**switch, "include_reasoning": False}  # a model that reasons nevertheless keeps it to itself
    if model.parsers.reasoning is None:
        raise ParameterError("think", f"{model.name!r} does not support thinking: leave think out, or send false")
    effort = "high" if think == "max" else think
    if isinstance(effort, str) and reads_reasoning_effort(effort, model.tokenizer):
        return {**switch, "reasoning_effort": effort}
    return switch


def _tools(tools: Sequence[OllamaTool] | None) -> list[Tool] | None:
    if not tools:
        return None
    return [
        Tool(
            type="function",
            function=FunctionDefinition(**tool.function.model_dump(exclude_unset=True)),
        )
        for tool in tools
    ]


def _messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The conversation, with an id for each call and answer that has none: many clients leave them out.

    An id depends on the place in the conversation alone, so that the prompts of later turns begin alike. It has nine
    letters and digits, which is what Mistral's templates accept.
    """
    converted = []
    unanswered: list[tuple[str, str]] = []  # (id, name) of calls
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.tool_calls or ():
            call_id = call.id or f"call{num_calls:05d}"
            num_calls += 1
            unanswered.append((call_id, call.function.name))
            function = FunctionCall(
                name=call.function.name, arguments=json.dumps(call.function.arguments, ensure_ascii=False)
            )
            calls.append(ChatToolCall(id=call_id, function=function))
        call_id = message.tool_call_id or None
        if message.role == "tool":
            call_id = _answered(unanswered, call_id, message.tool_name)
        converted.append(
            ChatMessage(
                role=message.role,
                content=message.content,
                name=message.tool_name or None,
                reasoning_content=message.thinking or None,
                tool_calls=calls or None,
                tool_call_id=call_id,
            )
        )
    return converted


def _answered(unanswered: list[tuple[str, str]], call_id: str | None, name: str | None) -> str | None:
    """The id of the call that a tool's message answers, which is taken from the list."""
    for index, (waiting_id, waiting_name) in enumerate(unanswered):
        if call_id == waiting_id or (call_id is None and name in (None, "", waiting_name)):
            del unanswered[index]
            return waiting_id
    return call_id
