"""A /v1/messages request as a chat request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxis.errors import ContextLengthError, RequestError
from jaxis.server.endpoints.chat_prompt import template_sources, thinking_variables
from jaxis.server.endpoints.message_turns import chat_messages, function_of, system_text
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.http.errors import ModelNotFoundError, ParameterError
from jaxis.server.protocol.chat import ChatCompletionRequest, ChatMessage
from jaxis.server.protocol.message_blocks import InlineTool, ToolAdditionBlock
from jaxis.server.protocol.message_tools import AnyChoice, NamedChoice, NoChoice, ToolDefinition
from jaxis.server.protocol.messages import CountTokensRequest, MessagesRequest, ThinkingOff, ThinkingOn
from jaxis.server.protocol.structured import JsonSchema, JsonSchemaFormat
from jaxis.server.protocol.tools import DeferredTool, FunctionName, NamedToolChoice, Tool

# Names in errors about the chat request -> this endpoint's.
_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
    ".function.description": ".description",
    "max_completion_tokens": "max_tokens",
    "continue_final_message=True": "an assistant's turn at the end of messages",
    "continue_final_message": "an assistant's turn at the end of messages",
    'tool_choice "required" or "none"': 'tool_choice {"type": "any"} or {"type": "none"}',
    'tool_choice "none"': 'tool_choice {"type": "none"}',
}
_OWN_NAME = re.compile("|".join(map(re.escape, _NAMES)) + r"|^stop\b")
_USUAL_EFFORTS = ("low", "medium", "high")


def chat_request(request: CountTokensRequest, model: ServedModel) -> ChatCompletionRequest:
    """The chat request with the same prompt and, of a `MessagesRequest`, the same answer.

    Raises:
      RequestError: A field cannot be honoured.
    """
    defined = _defined_tools(request)
    messages = chat_messages(request.messages, {tool.name: tool for tool in defined})
    if system := system_text(request.system):
        messages.insert(0, ChatMessage(role="system", content=system))
    if not messages:
        raise ParameterError("messages", "messages has nothing to answer but blocks that have no effect: add a text")
    goes_on = messages[-1].role == "assistant"
    if goes_on and request.thinking is not None and not isinstance(request.thinking, ThinkingOff):
        raise ParameterError(
            "messages", "messages ends with the assistant's turn, which leaves no place for thinking: disable thinking"
        )
    fields: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        fields = {
            "max_tokens": max(1, request.max_tokens),
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stream": request.stream,
        }
    return ChatCompletionRequest(
        model=request.model,
        messages=messages,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        chat_template_kwargs=_template_variables(request, model),
        include_reasoning=not isinstance(request.thinking, ThinkingOff),
        response_format=_response_format(request),
        **_tool_fields(request, defined),
        **fields,
    )


def left_out(request: CountTokensRequest, model: ServedModel) -> list[str]:
    """Names of the request's parts that have no effect: tools that run at Anthropic, an effort that nothing reads."""
    names = [f"tools.{tool.type}" for tool in request.tools or () if not tool.is_function]
    wants_effort = request.output_config is not None and request.output_config.effort is not None
    return (
        [*names, "output_config.effort"]
        if wants_effort and "reasoning_effort" not in template_sources(model.tokenizer)
        else names
    )


@contextmanager
def own_names() -> Iterator[None]:
    """Errors about the chat request in the words of this endpoint, and those that its clients look for."""
    try:
        yield
    except ModelNotFoundError:
        raise
    except ContextLengthError as error:
        # Claude Code compacts the conversation when it reads this.
        message = f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum"
        raise ParameterError("messages", message) from None
    except RequestError as error:
        message = _OWN_NAME.sub(lambda match: _NAMES.get(match[0], "stop_sequences"), str(error))
        raise ParameterError("messages", message) from None


def _defined_tools(request: CountTokensRequest) -> list[ToolDefinition]:
    """The request's functions, those defined between its turns last. Anthropic's own tools are left out."""
    added = [
        block.tool.definition.model_copy(update={"defer_loading": True})
        for message in request.messages
        for block in message.blocks
        if isinstance(block, ToolAdditionBlock) and isinstance(block.tool, InlineTool)
    ]
    offered = [*(request.tools or ()), *added]
    if isinstance(request.tool_choice, NamedChoice):
        named = [tool for tool in offered if tool.name == request.tool_choice.name]
        if named and not named[0].is_function:
            raise ParameterError(
                "tool_choice",
                f"tool_choice names a tool of type {named[0].type!r}, which does not run here: leave it out",
            )
    return [tool for tool in offered if tool.is_function]


def _tool_fields(request: CountTokensRequest, defined: Sequence[ToolDefinition]) -> dict[str, Any]:
    """The tools and the choice between them under the names of a chat request."""
    tools = [
        (DeferredTool if tool.defer_loading else Tool)(type="function", function=function_of(tool)) for tool in defined
    ]
    choice = request.tool_choice
    fields: dict[str, Any] = {"tools": tools or None}
    match choice:
        case AnyChoice():
            fields["tool_choice"] = "required"
        case NamedChoice(name=name):
            fields["tool_choice"] = NamedToolChoice(type="function", function=FunctionName(name=name))
        case NoChoice():
            fields["tool_choice"] = "none"
    if choice is not None and not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _response_format(request: CountTokensRequest) -> JsonSchemaFormat | None:
    given = request.output_config.format if request.output_config is not None else None
    if given is not None and request.output_format is not None:
        raise ParameterError("output_format", "output_format and output_config.format are the same: send only one")
    if (given := given or request.output_format) is None:
        return None
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema_))


def _template_variables(request: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    """Variables of the chat template that turn reasoning on or off; those that it does not read change nothing."""
    templates = template_sources(model.tokenizer)
    variables: dict[str, Any] = {}
    if isinstance(request.thinking, ThinkingOn | ThinkingOff):
        variables = thinking_variables(isinstance(request.thinking, ThinkingOn), model.tokenizer)
    effort = request.output_config.effort if request.output_config is not None else None
    if effort is not None and "reasoning_effort" in templates:
        is_known = effort in _USUAL_EFFORTS or f"'{effort}'" in templates or f'"{effort}"' in templates
        variables["reasoning_effort"] = effort if is_known else _USUAL_EFFORTS[-1]
    return variables
