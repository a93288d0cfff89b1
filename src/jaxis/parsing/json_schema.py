"""Readers of JSON schemas: types of the allowed values, schemas of properties. References are JSON pointers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxis.parsing.schema_references import target

ANY_TYPE = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""All types of JSON schema. A set with `number` has `integer` too; `integer` alone allows whole numbers only."""
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)
"""Keywords that constrain nothing."""
DEFINITIONS = frozenset({"$schema", "$id", "$anchor", "$defs", "definitions"})
"""Keywords that only say where schemas are."""
_TYPE_KEYS = frozenset({"type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
_NO_TYPE: frozenset[str] = frozenset()
# The types of which some value is allowed, and those of which every value is; None in a circle of references, where a
# schema says nothing that it does not say elsewhere.
_Types = tuple[frozenset[str], frozenset[str]]


def resolved(schema: object, root: object) -> Any:
    """Returns a schema or the target of its reference, relative to the root: never a mapping that has `$ref`.

    Keywords beside a reference count as well: the result is then an `allOf` of them and of what is referred to. A
    reference that leads nowhere or in a circle allows any value, as True does.
    """
    beside, seen = [], set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return True
        seen.add(reference)
        beside.append({key: schema[key] for key in schema.keys() - ANNOTATIONS - DEFINITIONS - {"$ref"}})
        schema = _referred(reference, root)
    beside = [keywords for keywords in beside if keywords]
    return {"allOf": [*beside, schema]} if beside else schema


def types(schema: object, root: object) -> frozenset[str]:
    """Returns the types of the values that a schema allows. Keywords other than types may allow fewer.

    References are relative to `root`, here and below.
    """
    found = _types(schema, root, {})
    return ANY_TYPE if found is None else found[0]


def conjuncts(schema: object, root: object) -> list[Any]:
    """Returns schemas without `$ref` or `allOf` whose conjunction is this schema; False is among them if it is one."""
    found: list[Any] = []
    seen: dict[int, object] = {}  # by id, and kept, so that no other gets it
    left = [schema]
    while left:
        part = resolved(left.pop(), root)
        if not isinstance(part, Mapping):
            found += [False] if part is False else []
            continue
        if isinstance(inner := part.get("allOf"), list):
            if id(inner) in seen:
                continue
            seen[id(inner)] = inner
            left += reversed(inner)
            part = {key: value for key, value in part.items() if key != "allOf"}
        if part.keys() - ANNOTATIONS - DEFINITIONS:
            found.append(part)
    return found


def type_of(value: object) -> str:
    """Returns the type of a value that was read from JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def admits(schema: object, root: object, value: object) -> bool:
    """Returns whether a value read from JSON has a type that a schema allows, and is listed if the schema lists values.

    The value's parts and other keywords are not checked.
    """
    return _admits(schema, root, value, {})


def _admits(schema: object, root: object, value: object, known: dict[int, bool]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    if id(schema) not in known:
        known[id(schema)] = False
        parts = conjuncts(schema, root)
        known[id(schema)] = all(part is not False and _part_admits(part, root, value, known) for part in parts)
    return known[id(schema)]


def _part_admits(schema: Mapping[str, Any], root: object, value: object, known: dict[int, bool]) -> bool:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and not any(type_of(item) == type_of(value) and item == value for item in listed):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and not any(_admits(option, root, value, known) for option in options):
            return False
    return type_of(value) in types(schema, root)


def property_schema(schema: object, key: str, root: object) -> Mapping[str, Any] | bool | None:
    """Returns the schema of an object's property; None if the object's schema says nothing of the property.

    Alternatives that do not name the property say nothing of it, even if they allow it to be anything.
    """
    return _property(schema, key, root, {})


def _referred(reference: str, root: object) -> Any:
    """Returns the target of a JSON pointer; True if there is none."""
    found = target(reference, root)
    return True if found is None else found


def _types(schema: object, root: object, known: dict[int, _Types | None]) -> _Types | None:
    if not isinstance(schema, Mapping):
        return (_NO_TYPE, _NO_TYPE) if schema is False else (ANY_TYPE, ANY_TYPE)
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = None
    parts = list(_type_parts(schema, root, known)) or [(ANY_TYPE, ANY_TYPE)]
    said = [part for part in parts if part is not None]
    known[id(schema)] = _all_of(said) if said else None
    return known[id(schema)]


def _type_parts(schema: Mapping[str, Any], root: object, known: dict[int, _Types | None]) -> Iterator[_Types | None]:
    """Yields the types that each keyword allows; all of them hold."""

    def of(keyword: str) -> _Types:
        return _types(schema.get(keyword, True), root, known) or (ANY_TYPE, _NO_TYPE)

    if schema.keys() - _TYPE_KEYS - ANNOTATIONS - DEFINITIONS:
        yield ANY_TYPE, _NO_TYPE
    if named := _named_types(schema.get("type")):
        yield named, named
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        yield frozenset(map(type_of, values)), frozenset({"null"} if None in values else ())
    if isinstance(reference := schema.get("$ref"), str):
        yield _types(_referred(reference, root), root, known)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            parts = [part for option in options if (part := _types(option, root, known)) is not None]
            combined = _all_of if keyword == "allOf" else _any_of if keyword == "anyOf" else _one_of
            yield combined(parts) if parts else None
    if "not" in schema:
        some, every = of("not")
        yield ANY_TYPE - every, ANY_TYPE - some
    if "if" in schema:
        (some, every), (then, every_then), (other, every_other) = of("if"), of("then"), of("else")
        yield (some & then) | ((ANY_TYPE - every) & other), every_then & every_other


def _all_of(parts: list[_Types]) -> _Types:
    return frozenset.intersection(*(some for some, _ in parts)), frozenset.intersection(*(every for _, every in parts))


def _any_of(parts: list[_Types]) -> _Types:
    return _NO_TYPE.union(*(some for some, _ in parts)), _NO_TYPE.union(*(every for _, every in parts))


def _one_of(parts: list[_Types]) -> _Types:
    some, every = _any_of(parts)
    return some, frozenset(name for name in every if sum(name in some for some, _ in parts) == 1)


def _named_types(names: object) -> frozenset[str]:
    given = names if isinstance(names, list) else [names]
    return frozenset(name for name in ANY_TYPE if name in given or (name == "integer" and "number" in given))


_Property = Mapping[str, Any] | bool | None


def _property(schema: object, key: str, root: object, known: dict[int, _Property]) -> _Property:
    if not isinstance(schema, Mapping):
        return None
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = None
    parts = [part for part in _property_parts(schema, key, root, known) if part is not None]
    known[id(schema)] = None if not parts else parts[0] if len(parts) == 1 else {"allOf": parts}
    return known[id(schema)]


def _property_parts(
    schema: Mapping[str, Any], key: str, root: object, known: dict[int, _Property]
) -> Iterator[_Property]:
    """Yields the property's schema by each keyword; all of them hold."""
    own = [value for name, value in _named(schema, "properties") if name == key]
    own += [value for pattern, value in _named(schema, "patternProperties") if _matches(pattern, key)]
    if not own and isinstance(more := schema.get("additionalProperties"), Mapping):
        own = [more]
    yield from (value for value in own if isinstance(value, Mapping) or value is True)
    if isinstance(reference := schema.get("$ref"), str):
        yield _property(_referred(reference, root), key, root, known)
    for keyword in ("allOf", "anyOf", "oneOf"):
        options = schema.get(keyword)
        parts = [_property(option, key, root, known) for option in options] if isinstance(options, list) else []
        yield from parts if keyword == "allOf" else (_alternatives(parts),)
    yield _alternatives([_property(schema.get(keyword), key, root, known) for keyword in ("then", "else")])
    for _, dependent in _named(schema, "dependentSchemas"):
        yield _property(dependent, key, root, known)


def _alternatives(parts: list[_Property]) -> _Property:
    named = [part for part in parts if part is not None]
    return {"anyOf": named} if named else None


def _named(schema: Mapping[str, Any], keyword: str) -> list[tuple[str, Any]]:
    values = schema.get(keyword)
    return list(values.items()) if isinstance(values, Mapping) else []


def _matches(pattern: str, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return False
