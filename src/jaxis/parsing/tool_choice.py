"""What a request's `tool_choice` asks of the prompt, of the model and of the parser."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxis.errors import RequestError
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_list import BareCallListToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.tokenizer.chat_template import render_chat_template

# What stands under these keys: schemas by names of any kind, and values that are no schemas.
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


@dataclass(frozen=True)
class ToolPlan:
    """How to answer a request with tools.

    Attributes:
      mode: What was chosen.
      tools: What the model may call.
      json_schema: What its answer must follow, if it must call: all of it that comes after reasoning.
      parser: Reads such an answer; None leaves it to the model's own parser.
    """

    mode: Literal["none", "auto", "required", "named"]
    tools: tuple[FunctionTool, ...]
    json_schema: Mapping[str, Any] | None = None
    parser: type[ToolParser] | None = None


def plan_tools(
    tools: Sequence[FunctionTool],
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    parallel_tool_calls: bool = True,
) -> ToolPlan:
    """Makes the plan.

    Args:
      tools: As `function_tools` reads them.
      tool_choice: "none", "auto", "required", {"type": "function", "function": {"name": "f"}}, or None: "auto" where
        there are tools.
      parallel_tool_calls: Whether an answer that must call may have more than one call.

    Raises:
      RequestError: The choice is none of these, or there is no such function.
    """
    if tool_choice is None:
        tool_choice = "auto" if tools else "none"
    if tool_choice == "none" or (tool_choice == "auto" and not tools):
        return ToolPlan("none", ())
    if tool_choice == "auto":
        return ToolPlan("auto", tuple(tools))
    if not tools:
        raise RequestError("tool_choice names a call to make, but tools is empty: send the functions in tools")
    if tool_choice == "required":
        schema = required_tools_schema(tools, max_calls=None if parallel_tool_calls else 1)
        return ToolPlan("required", tuple(tools), schema, BareCallListToolParser)
    chosen = [tool for tool in tools if tool.name == _chosen_name(tool_choice)]
    if not chosen:
        raise RequestError(f"tool_choice names {_chosen_name(tool_choice)!r}, which is not in tools")
    schema = required_tools_schema(chosen, max_calls=1)
    return ToolPlan("named", tuple(tools), schema, BareCallListToolParser)


def _chosen_name(tool_choice: object) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
    )


def required_tools_schema(tools: Sequence[FunctionTool], *, max_calls: int | None = None) -> dict[str, Any]:
    """The JSON schema of a list of calls, [{"name": "f", "parameters": {...}}], with at least one.

    Args:
      tools: What may be called.
      max_calls: The longest list; None has no limit.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": _moved(tool.parameters, f"#/items/anyOf/{i}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def _moved(schema: Any, place: str) -> Any:
    """A schema with its references to its own parts right for its place in another one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            moved[key] = {name: _moved(item, place) for name, item in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key not in ("$id", "$schema"):  # of a document of its own, which this is no more
            moved[key] = value if key in _VALUES else _moved(value, place)
    return moved


def template_messages(messages: Sequence[Mapping[str, Any]], chat_template: str) -> list[dict[str, Any]]:
    """Messages with the arguments of their tool calls as the template needs them: an object, or its JSON text.

    Args:
      messages: As OpenAI writes them, with arguments as JSON text. Their other fields stay.
      chat_template: The template that will render them.

    Raises:
      RequestError: Arguments are not the text of a JSON object.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [dict(message) for message in messages]
    as_text = _needs_arguments_as_text(chat_template)
    return [
        {
            **message,
            "tool_calls": [
                _template_call(call, f"messages[{i}].tool_calls[{j}]", as_text)
                for j, call in enumerate(message["tool_calls"])
            ],
        }
        if message.get("tool_calls")
        else dict(message)
        for i, message in enumerate(messages)
    ]


def _template_call(call: Mapping[str, Any], where: str, as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise RequestError(f"{where}.function.arguments must be the text of a JSON object")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(value, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments if as_text else value}}


@functools.lru_cache(maxsize=64)
def _needs_arguments_as_text(chat_template: str) -> bool:
    """Whether the template joins arguments to its text, as DeepSeek's do, and fails on an object."""

    def renders(arguments: object) -> bool:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            render_chat_template(chat_template, messages, add_generation_prompt=False)
        except RequestError:
            return False
        return True

    return not renders({"a": 1}) and renders('{"a": 1}')
