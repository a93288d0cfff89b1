"""The effect of a request's `tool_choice` on the model and on the parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxis.errors import RequestError
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_list import BareCallListToolParser
from jaxis.parsing.tool_parsers.tools import FunctionTool

# The values of these keys: schemas under arbitrary names, and values that are not schemas.
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


@dataclass(frozen=True)
class ToolPlan:
    """How to answer a request with tools.

    Attributes:
      mode: The chosen mode.
      tools: The functions that the model may call.
      json_schema: The schema of its answer after any reasoning, if it must call.
      parser: Parses an answer that follows `json_schema`; None uses the model's own parser.
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
    """How to honour a request's tool_choice.

    Args:
      tools: As `function_tools` reads them.
      tool_choice: "none", "auto", "required", {"type": "function", "function": {"name": "f"}}, or None: "auto" if
        there are tools.
      parallel_tool_calls: Whether an answer that must call may contain more than one call.

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
        raise RequestError("names a call to make, but tools is empty: send the functions in tools", param="tool_choice")
    if tool_choice == "required":
        schema = required_tools_schema(tools, max_calls=None if parallel_tool_calls else 1)
        return ToolPlan("required", tuple(tools), schema, BareCallListToolParser)
    chosen = [tool for tool in tools if tool.name == _chosen_name(tool_choice)]
    if not chosen:
        raise RequestError(f"names {_chosen_name(tool_choice)!r}, which is not in tools", param="tool_choice")
    schema = required_tools_schema(chosen, max_calls=1)
    return ToolPlan("named", tuple(tools), schema, BareCallListToolParser)


def _chosen_name(tool_choice: object) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise RequestError(
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}', param="tool_choice"
    )


def required_tools_schema(tools: Sequence[FunctionTool], *, max_calls: int | None = None) -> dict[str, Any]:
    """The JSON schema of a list of calls, [{"name": "f", "parameters": {...}}], with at least one.

    Args:
      tools: The functions that may be called.
      max_calls: Maximum length of the list; None is no limit.
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


def _moved(schema: object, place: str) -> Any:
    """A schema whose internal references are rewritten for its place in another schema."""
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
        elif key not in ("$id", "$schema"):  # only meaningful at the root of a document, which this no longer is
            moved[key] = value if key in _VALUES else _moved(value, place)
    return moved
