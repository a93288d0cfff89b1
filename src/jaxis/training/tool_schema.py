"""Tools of Python functions: JSON schemas from type hints and docstrings."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable
from typing import Any, Literal, Union

from jaxis.errors import ConfigError

_TYPES: dict[Any, dict[str, Any]] = {
    **{str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"}},
    **{list: {"type": "array"}, dict: {"type": "object"}, type(None): {"type": "null"}, Any: {}},
}
_SECTION = re.compile(r"(Args|Returns|Raises):")
_ARGUMENT = re.compile(r"(\w+)(?: \([^()]*\))?:\s*(.*)")


def tool_schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Returns the JSON schema of a function in OpenAI's format, from its type hints and docstring.

    transformers makes it so for tools. The docstring, in Google's style, describes each argument. Raises ConfigError,
    which names `where`, if a type hint or the description of an argument is missing, or a type has no JSON schema.
    """
    text, arguments, returned = _described(inspect.getdoc(function) or "")
    if not text:
        raise ConfigError(f"{where} has no docstring, which would tell the model what it does: write one")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"{where}: a type hint cannot be read: {error}") from None
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints:
            raise ConfigError(f"{where}: its argument {name!r} has no type hint: give it one")
        if name not in arguments:
            raise ConfigError(f'{where}: its docstring does not describe the argument {name!r}: do, under "Args:"')
        if (schema := _schema_of(hints[name])) is None:
            raise ConfigError(
                f"{where}: its argument {name!r} is {hints[name]}: give it a type that JSON has, such as str, int, "
                "list[str] or Literal"
            )
        properties[name] = {**schema, "description": arguments[name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    described = {"name": function.__name__, "description": text, "parameters": parameters}
    if "return" in hints and (schema := _schema_of(hints["return"])) is not None:
        described["return"] = schema | ({"description": returned} if returned else {})
    return {"type": "function", "function": described}


def _schema_of(hint: Any) -> dict[str, Any] | None:
    """Returns the schema of a type; None if JSON has none."""
    if isinstance(hint, Hashable) and hint in _TYPES:
        return dict(_TYPES[hint])
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        kinds = list(dict.fromkeys(_TYPES[type(part)]["type"] for part in parts))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(parts)}
    if origin in (Union, types.UnionType):
        return _schema_of_union(parts)
    inner = _schema_of(parts[-1]) if origin in (list, dict) else None
    if inner is None:
        return None
    return {**_TYPES[origin], "items" if origin is list else "additionalProperties": inner}


def _schema_of_union(parts: tuple[Any, ...]) -> dict[str, Any] | None:
    others = [_schema_of(part) for part in parts if part is not type(None)]
    schemas = [schema for schema in others if schema is not None]
    if len(schemas) < len(others):
        return None
    nullable = {"nullable": True} if len(others) < len(parts) else {}
    if len(schemas) == 1:
        return schemas[0] | nullable
    if all(schema.keys() == {"type"} for schema in schemas):
        return {"type": sorted({schema["type"] for schema in schemas})} | nullable
    return {"anyOf": schemas} | nullable


def _described(doc: str) -> tuple[str, dict[str, str], str]:
    """Returns a docstring's descriptions of the function, of each argument and of the result."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in doc.splitlines():
        if found := _SECTION.fullmatch(line.strip()):
            current = found[1]
            sections[current] = []
        else:
            sections[current].append(line)
    arguments: dict[str, str] = {}
    name, margin = "", None
    for line in filter(str.strip, sections.get("Args", ())):
        indent = len(line) - len(line.lstrip())
        margin = indent if margin is None else margin
        if indent <= margin and (found := _ARGUMENT.fullmatch(line.strip())):
            name, arguments[found[1]] = found[1], found[2]
        elif name:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(sections[""]).strip(), arguments, "\n".join(sections.get("Returns", ())).strip()
