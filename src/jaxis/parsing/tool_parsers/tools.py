"""The functions that a request offers to the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxis.errors import RequestError

MAX_TOOLS = 128
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class FunctionTool:
    """A function.

    Attributes:
      name: Letters, digits, `_`, `-` and `.`; at most 128.
      description: What it does, for the model.
      parameters: JSON schema of the object with its arguments.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


def function_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[FunctionTool, ...]:
    """Reads the `tools` of a request.

    Args:
      tools: Each is {"type": "function", "function": {"name", "description", "parameters", "strict"}}.

    Raises:
      RequestError: One is not a function, its name is not allowed or taken, its parameters are not the schema of an
        object, or there are more than 128.
    """
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} functions; send {MAX_TOOLS} at most")
    functions: dict[str, FunctionTool] = {}
    for i, tool in enumerate(tools):
        function = _function_tool(tool, f"tools[{i}]")
        if function.name in functions:
            raise RequestError(f"tools[{i}].function.name {function.name!r} is taken: give each function its own name")
        functions[function.name] = function
    return tuple(functions.values())


def _function_tool(tool: object, where: str) -> FunctionTool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}; there are no other tools')
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must be 1 to 128 letters, digits, '_', '-' or '.', not {name!r}")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.function.description must be a string, not {type(description).__name__}")
    if parameters is None or parameters == {}:
        return FunctionTool(name, description)
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f'{where}.function.parameters must be a JSON schema with "type": "object"')
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise RequestError(f"{where}.function.parameters.properties must be an object with a schema for each argument")
    return FunctionTool(name, description, {"type": "object", **parameters})
