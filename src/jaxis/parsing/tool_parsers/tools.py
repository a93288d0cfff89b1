from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxis.errors import RequestError
from jaxis.parsing.schema_references import with_pointers

MAX_TOOLS = 128
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call.

    Attributes:
      name: Letters, digits, `_`, `-` and `.`; at most 128.
      description: Description for the model.
      parameters: JSON schema of the object with its arguments; references are JSON pointers.
      strict: True if arguments must follow the schema even where the model decides to call.
      place: Place in the request, for errors.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    place: str = field(default="tools", compare=False)


def function_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[FunctionTool, ...]:
    """Reads the `tools` of a request in OpenAI's format.

    Each is {"type": "function", "function": {"name", "description", "parameters", "strict"}}. Raises RequestError if an
    entry is not a function; or see `checked_functions`.
    """
    functions: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise RequestError(
                'must be {"type": "function", "function": {...}}; there are no other tools', param=f"tools[{i}]"
            )
        functions[f"tools[{i}].function"] = function
    return checked_functions(functions)


def checked_functions(functions: Mapping[str, Mapping[str, Any]]) -> tuple[FunctionTool, ...]:
    """Reads functions, each {"name", "description", "parameters"}, by their places in the request.

    Errors name the places, such as "tools[0].function". Raises RequestError if a name is not allowed or taken,
    parameters are not the schema of an object, or there are more than 128 functions.
    """
    if len(functions) > MAX_TOOLS:
        raise RequestError(f"holds {len(functions)} functions; send {MAX_TOOLS} at most", param="tools")
    checked: dict[str, FunctionTool] = {}
    for place, fields in functions.items():
        function = _function_tool(fields, place)
        if function.name in checked:
            raise RequestError(f"{function.name!r} is taken: give each function its own name", param=f"{place}.name")
        checked[function.name] = function
    return tuple(checked.values())


def _function_tool(fields: Mapping[str, Any], place: str) -> FunctionTool:
    name, description, parameters = (fields.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise RequestError(f"must be 1 to 128 letters, digits, '_', '-' or '.', not {name!r}", param=f"{place}.name")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"must be a string, not {type(description).__name__}", param=f"{place}.description")
    strict = fields.get("strict") is True
    if parameters is None or parameters == {}:
        return FunctionTool(name, description, strict=strict, place=place)
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError('must be a JSON schema with "type": "object"', param=f"{place}.parameters")
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise RequestError("must be an object with a schema for each argument", param=f"{place}.parameters.properties")
    return FunctionTool(name, description, with_pointers({"type": "object", **parameters}), strict, place)
