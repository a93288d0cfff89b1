"""The negation of a JSON schema, where schemas without `not` can express it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any] | bool
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_CHARACTERS = 2000  # of strings that are excluded


def negated(schema: Schema) -> Schema | None:
    """Returns a schema of the values that are not valid under this one; None if no schema can express it.

    Args:
      schema: Rewritten schema, without keywords that have no effect.
    """
    if isinstance(schema, bool) or not schema:
        return schema is False
    # A schema holds if all its keywords do.
    options: list[Schema] = []
    names, rest = _types(schema), {key: value for key, value in schema.items() if key != "type"}
    if "type" in schema:
        if "integer" in names and "number" not in names:
            return None
        options.append({"type": [name for name in _TYPES if name not in names]})
    allowed = [name for name in names if name in _TYPES]
    objects = {key: rest.pop(key) for key in ("properties", "required") if key in rest}
    if objects and "object" in names:
        found = _negated_object(objects.get("properties", {}), objects.get("required", []))
        if found is None:
            return None
        options += found
    for key, value in rest.items():
        part = _negated_keyword(key, value)
        if part is None:
            return None
        options.append(part if "type" not in schema else {"allOf": [{"type": allowed}, part]})
    options = [option for option in options if option is not False and option != {"type": []}]
    return {"anyOf": options} if options else False


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    names = schema.get("type", _TYPES)
    return [names] if isinstance(names, str) else names


def _negated_object(properties: Mapping[str, Schema], required: Sequence[str]) -> list[Schema] | None:
    options: list[Schema] = [{"type": "object", "properties": {name: False}} for name in required]
    for name, value in properties.items():
        opposite = negated(value)
        if opposite is None:
            return None
        options.append({"type": "object", "properties": {name: opposite}, "required": [name]})
    return options


def _negated_keyword(key: str, value: Any) -> Schema | None:
    match key:
        case "anyOf" | "allOf":
            parts = [negated(part) for part in value]
            return None if None in parts else {"allOf" if key == "anyOf" else "anyOf": parts}
        case "const":
            return _none_of([value])
        case "enum":
            return _none_of(value)
    return None


def _none_of(values: Sequence[Any]) -> Schema | None:
    """Returns a schema of other values than these: null, booleans and strings."""
    strings = [value for value in values if isinstance(value, str)]
    flags = [value for value in values if isinstance(value, bool)]
    if len(strings) + len(flags) + (None in values) * values.count(None) != len(values):
        return None
    if sum(map(len, strings)) > _MAX_CHARACTERS:
        return None
    options: list[Schema] = [{"type": ["number", "array", "object"]}]
    options += [] if None in values else [{"type": "null"}]
    options += [{"const": flag} for flag in (True, False) if flag not in flags]
    options.append({"type": "string", "pattern": f"^{_other_text(strings)}$"} if strings else {"type": "string"})
    return {"anyOf": options}


def _other_text(strings: Sequence[str]) -> str:
    """Returns a regular expression of the strings that are not these."""
    if not strings:
        return "(?s:.*)"
    firsts = sorted({text[0] for text in strings if text})
    options = [
        f"{_escaped(first)}{_other_text([text[1:] for text in strings if text[:1] == first])}" for first in firsts
    ]
    options.append(f"[^{''.join(map(_escaped, firsts))}](?s:.*)" if firsts else "(?s:.+)")
    return f"(?:{'|'.join(options)}){'' if '' in strings else '?'}"


def _escaped(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
