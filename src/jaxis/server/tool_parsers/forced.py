"""Calls that tool_choice demands: structured output makes the whole text JSON, in a form of our own for every model.

With "required" it is an array of {"name", "parameters"}, with a named function the object of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxis.server.text_reader import Reading
from jaxis.server.tool_parsers.json_call import JSONToolParser
from jaxis.server.tool_parsers.json_value import expect
from jaxis.server.tool_parsers.tools import FunctionTool

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class _ForcedToolParser(JSONToolParser):
    """Reads a text that is nothing but calls."""

    def _read(self) -> Reading[None]:
        self._reader.record()
        yield from self._attempt("")
        yield from self._reader.until((), self._add_content)


class NamedToolParser(_ForcedToolParser):
    """Reads the arguments of the only function that was offered."""

    def _read_call(self, opener: str) -> Reading[None]:
        yield from self._read_arguments(next(iter(self._tools)))
        self._end_call()


class RequiredToolParser(_ForcedToolParser):
    """Reads an array of calls."""

    def _read_call(self, opener: str) -> Reading[None]:
        yield from expect(self._reader, "[")
        while True:
            yield from self._read_call_object()
            self._end_call()
            if (yield from self._reader.skip_space()) != ",":
                break
            self._reader.skip(1)
        yield from expect(self._reader, "]")


def required_calls_schema(tools: Sequence[FunctionTool], max_calls: int | None = None) -> dict[str, Any]:
    """JSON schema of what `RequiredToolParser` reads, at least one call.

    Args:
      tools: The functions that may be called.
      max_calls: Most calls; None leaves it to the model.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{tool.name}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        "$defs": {tool.name: _moved(arguments_schema(tool), f"#/$defs/{tool.name}") for tool in tools},
    }
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def arguments_schema(tool: FunctionTool) -> dict[str, Any]:
    """JSON schema of a function's arguments; of one that takes none, an empty object."""
    schema = dict(tool.parameters)
    return schema if set(schema) - {"type", "properties"} or schema.get("properties") else _NO_ARGUMENTS


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself as they are once it stands at `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        is_reference = key == "$ref" and isinstance(value, str) and value.startswith("#")
        moved[key] = root + value[1:] if is_reference else _moved(value, root)
    return moved
