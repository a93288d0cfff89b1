"""Translation of the body of /v1/responses to a generation job."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.parsing.tool_parsers.text_input import TextInputToolParser
from jaxis.server.generation.answer_format import AnswerFormat, ToolUse, choose_tools
from jaxis.server.generation.effort import effort_budget, effort_variables
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.images import image_part
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import ChatPrompt, template_variables
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.body import new_id
from jaxis.server.openai.fields import JsonObjectFormat
from jaxis.server.openai.job_parameters import sampling_settings
from jaxis.server.openai.response_items import (
    CustomToolCallItem,
    FunctionCallItem,
    HostedCall,
    InputImage,
    InputMessage,
    InputPart,
    ItemReference,
    ReasoningItem,
    ToolCallOutput,
    text_of,
)
from jaxis.server.openai.response_schema import INCLUDED, ResponseRequest, TextSchemaFormat
from jaxis.server.openai.response_tools import (
    GrammarInput,
    NamedTool,
    OfferedTool,
    custom_arguments,
    function_name,
    hosted_types,
    offered_tools,
)


def response_job(request: ResponseRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request.

    Raises:
      RequestError: A field cannot be honoured.
    """
    if request.top_logprobs is not None and not request.wants_logprobs:
        raise RequestError('needs include=["message.output_text.logprobs"]: add it', param="top_logprobs")
    model = model.named(request.model)
    settings = sampling_settings(request) | {
        "max_tokens": request.max_output_tokens,
        "logprobs": (request.top_logprobs or 0) if request.wants_logprobs else None,
    }
    if request.thinking_token_budget is None:
        settings["thinking_token_budget"] = effort_budget(_effort(request), model)
    offered = offered_tools(request.tools)
    prompt = _conversation(request, offered, model)
    answer = AnswerFormat.of_chat(model, _tool_use(request, offered, model), _grammar(request))
    if request.wants_logprobs and answer.is_parsed:
        raise RequestError(
            "asks for message.output_text.logprobs, which are those of the whole text, of which reasoning and calls of "
            "tools are no part: leave them out, or ask /v1/chat/completions",
            param="include",
        )
    return make_job(new_id("resp"), model, prompt, settings, answer, priority=request.priority, stream=request.stream)


def left_out(request: ResponseRequest, model: ServedModel) -> list[str]:
    """Returns names of ineffective parts of a request: those of other servers, and those unread by the model."""
    items = () if isinstance(request.input, str) else request.input
    return [
        *(f"tools.{kind}" for kind in hosted_types(request.tools)),
        *(f"input.{item.type}" for item in items if isinstance(item, HostedCall)),
        *(f"include.{name}" for name in request.include or () if name not in INCLUDED),
        *(["reasoning.effort"] if effort_variables(_effort(request), model) is None else ()),
    ]


def _effort(request: ResponseRequest) -> str | None:
    return None if request.reasoning is None else request.reasoning.effort


def _conversation(request: ResponseRequest, offered: Sequence[OfferedTool], model: ServedModel) -> ChatPrompt:
    is_text = isinstance(request.input, str)
    if any(isinstance(item, ItemReference) for item in request.input):
        raise RequestError("has an item_reference, and nothing is stored here: send the item", param="input")
    messages = [{"role": "user", "content": request.input}] if is_text else _template_messages(request.input, model)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise RequestError("has nothing to answer but items that have no effect: add a message", param="input")
    variables = template_variables(request.chat_template_kwargs, model.tokenizer)
    variables |= effort_variables(_effort(request), model) or {}  # clients send an effort to every model
    return ChatPrompt(
        messages=messages,
        tools=[] if request.tool_choice == "none" else [tool.for_template for tool in offered],
        variables=variables,
        cache_salt=request.cache_salt,
    )


def _template_messages(items: Sequence[Any], model: ServedModel) -> list[dict[str, Any]]:
    """Returns items (`InputItem`) as messages of a `ChatPrompt`.

    Consecutive reasoning, text and calls of an assistant become one message.

    Raises:
      RequestError: The model or the item's role takes no images, or an image is invalid.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's turn, while more items may belong to it
    for i, item in enumerate(_without_malformed_calls(items)):
        match item:
            case ReasoningItem():
                turn = None
                if item.text:
                    turn = {"role": "assistant", "reasoning_content": item.text}
                    messages.append(turn)
            case InputMessage(role="assistant"):
                if turn is None or "content" in turn or "tool_calls" in turn:
                    turn = {"role": "assistant"}
                    messages.append(turn)
                turn["content"] = _content(item.content, model, f"input[{i}].content", may_see=False)
            case FunctionCallItem() | CustomToolCallItem():
                if turn is None:
                    turn = {"role": "assistant"}
                    messages.append(turn)
                turn.setdefault("tool_calls", []).append(_template_call(item))
            case ToolCallOutput():
                turn = None
                output = _content(item.output, model, f"input[{i}].output")
                messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
            case InputMessage():
                turn = None
                content = _content(item.content, model, f"input[{i}].content", may_see=item.role == "user")
                messages.append({"role": item.role, "content": content})
    return [
        {"role": message["role"], "content": message.get("content") or (None if "tool_calls" in message else "")}
        | {name: value for name, value in message.items() if name not in ("role", "content")}
        for message in messages
    ]


def _without_malformed_calls(items: Sequence[Any]) -> list[Any]:
    """Returns items with None in place of calls that a stream announced before they turned out malformed.

    Such a call is incomplete, and a message with its text follows, which becomes one with the message before the call.
    A call that the client has answered stays.
    """
    kept = list(items)
    answered = {item.call_id for item in items if isinstance(item, ToolCallOutput)}
    for i, (item, after) in enumerate(itertools.pairwise(items)):
        if not isinstance(item, FunctionCallItem | CustomToolCallItem) or item.status != "incomplete":
            continue
        if item.call_id in answered or not _is_said(after):
            continue
        kept[i] = None
        if i and _is_said(kept[i - 1]):
            kept[i + 1] = after.model_copy(update={"content": text_of(kept[i - 1].content) + text_of(after.content)})
            kept[i - 1] = None
    return kept


def _is_said(item: object) -> bool:
    return isinstance(item, InputMessage) and item.role == "assistant"


def _content(
    content: str | list[InputPart], model: ServedModel, place: str, *, may_see: bool = True
) -> str | list[dict[str, Any]]:
    """Returns a content of a `ChatPrompt`: one string, or parts if it has images."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return text_of(content)
    if not may_see:
        raise RequestError("has an image, which only messages of the user and outputs of tools may have", param=place)
    return [
        image_part(part.image_url, model, f"{place}[{j}].image_url")
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for j, part in enumerate(content)
    ]


def _template_call(item: FunctionCallItem | CustomToolCallItem) -> dict[str, Any]:
    arguments = custom_arguments(item.input) if isinstance(item, CustomToolCallItem) else item.arguments
    function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _tool_use(request: ResponseRequest, offered: Sequence[OfferedTool], model: ServedModel) -> ToolUse:
    """Returns the rules for the answer's tool calls.

    If the answer must call one custom tool whose input has a grammar, the answer is the input itself, and follows the
    grammar. If the model is free to call, it writes the input as a JSON string in a call of its own format, to which
    the grammar cannot apply; the model then reads the grammar in the tool's description.

    Raises:
      RequestError: A tool or its grammar is invalid.
    """
    choice: str | dict[str, Any] | None
    name = None
    if isinstance(request.tool_choice, NamedTool):
        name = function_name(request.tool_choice.name, request.tool_choice.namespace)
        choice = {"type": "function", "function": {"name": name}}
    else:
        choice = request.tool_choice
    functions = {tool.place: tool.function for tool in offered}
    tools = choose_tools(model, functions, choice, parallel=request.parallel_tool_calls is not False)
    for tool in offered:
        if tool.function_name == name and tool.custom is not None and isinstance(tool.custom.format, GrammarInput):
            given = tool.custom.format
            constraint: dict[str, Any] = {"grammar" if given.syntax == "lark" else "regex": given.definition}
            return dataclasses.replace(
                tools,
                tools=[function for function in tools.tools if function.name == name],
                parser=TextInputToolParser,
                grammar=AnswerGrammar.of(f"{tool.place}.format.definition", holds_calls=True, **constraint),
            )
    return tools


def _grammar(request: ResponseRequest) -> AnswerGrammar | None:
    match request.text.format if request.text is not None else None:
        case TextSchemaFormat(schema_=schema):
            return AnswerGrammar.of("text.format.schema", json_schema=schema)
        case JsonObjectFormat(schema_=schema) if schema is not None:
            return AnswerGrammar.of("text.format.schema", json_schema=schema)
        case JsonObjectFormat():
            return AnswerGrammar.of("text.format", json_object=True)
    return None
