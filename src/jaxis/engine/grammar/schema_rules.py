"""Keywords of JSON schemas that llguidance lacks, expressed by those that it has.

Each rule reads one schema. It either returns another schema that must hold too, or changes the rewritten keywords.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any, Protocol

from jaxis.engine.grammar.negated_schema import Schema, negated
from jaxis.errors import RequestError
from jaxis.parsing.json_schema import conjuncts, resolved, types
from jaxis.parsing.schema_references import target

_MAX_UNIQUE = 4  # values of which every order is written out
_MAX_DEPTH = 4  # of properties, by which alternatives are told apart
_MAX_OVERLAPS = 4  # of one alternative with others
_NOT_EMPTY = {"minItems": 1}
_STRING_KEYWORDS = frozenset({"pattern", "minLength", "maxLength"})
_APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies", "not")
_TYPES = ("null", "boolean", "number", "string", "array", "object")


class Rewriter(Protocol):
    """Rewriter of the schemas of one document."""

    ignored: set[str]
    root: Any

    def schema(self, node: Any, place: str) -> Schema:
        """Rewrites a schema."""
        ...

    def inlined(self, node: Any, place: str) -> Schema:
        """Rewrites a schema with the target in place of its reference."""
        ...

    def map(self, value: Any, place: str) -> Iterable[tuple[str, Any]]:
        """Returns the items of an object."""
        ...

    def searches(self, pattern: str, place: str) -> tuple[str, ...]:
        """Returns patterns in the syntax of Rust: all of them must be found."""
        ...

    def error(self, message: str) -> RequestError:
        """Returns an error about the document."""
        ...


@dataclass(frozen=True)
class Spot:
    """One schema of a document.

    Attributes:
      rewriter: Rewriter of the document.
      node: The schema.
      out: Rewritten keywords that llguidance has; rules may change them.
      place: Place in the document, for errors.
    """

    rewriter: Rewriter
    node: Mapping[str, Any]
    out: dict[str, Any]
    place: str

    def unsupported(self, key: str) -> RequestError:
        """Returns an error about a keyword."""
        return self.rewriter.error(f"{key} of {self.place} is not supported with this value: say it otherwise, or not")


def _alternatives(at: Spot) -> Schema | None:
    """Turns oneOf into anyOf, of options that exclude each other, or are each written without those that overlap it."""
    options = at.node.get("oneOf")
    if not isinstance(options, list):
        return None
    overlaps: list[list[int]] = [[] for _ in options]
    not_empty: set[int] = set()
    for i, j in combinations(range(len(options)), 2):
        if _are_disjoint(options[i], options[j], at.rewriter.root, 0):
            continue
        if _are_disjoint({"allOf": [options[i], _NOT_EMPTY]}, options[j], at.rewriter.root, 0):
            not_empty |= {i, j}
            continue
        overlaps[i].append(j)
        overlaps[j].append(i)
    if any(len(others) > _MAX_OVERLAPS for others in overlaps):
        raise _overlapping(at)
    opposites: dict[int, Schema] = {}
    for i in {i for others in overlaps for i in others}:
        opposite = negated(at.rewriter.inlined(options[i], f"{at.place}/oneOf/{i}"))
        if opposite is None:
            raise _overlapping(at)
        opposites[i] = opposite
    written = [
        functools.reduce(
            _both, (opposites[other] for other in others), _both(option, _NOT_EMPTY if i in not_empty else True)
        )
        for i, (option, others) in enumerate(zip(at.out.pop("oneOf"), overlaps, strict=True))
    ]
    return {"anyOf": [option for option in written if option is not False]}


def _overlapping(at: Spot) -> RequestError:
    return at.rewriter.error(f"oneOf of {at.place} is not supported, since a value may fit several of it: use anyOf")


def _are_disjoint(first: Any, second: Any, root: Any, depth: int) -> bool:
    """Returns whether certainly no value is valid under both schemas."""
    if depth > _MAX_DEPTH:
        return False
    parts, others = conjuncts(first, root), conjuncts(second, root)
    if False in (*parts, *others):
        return True
    for values, more in product(map(_values, parts), map(_values, others)):
        if values is not None and more is not None and not any(value in more for value in values):
            return True
    if any(_excludes_options(part, second, root, depth) for part in parts):
        return True
    if any(_excludes_options(part, first, root, depth) for part in others):
        return True
    if (shared := types(first, root) & types(second, root)) == {"array"}:
        return any(part.get("minItems", 0) or 0 for part in (*parts, *others)) and any(
            _are_disjoint_arrays(part, other, root, depth) for part, other in product(parts, others)
        )
    if shared != {"object"}:
        return not shared
    names = {name for part in (*parts, *others) for name in _as_list(part.get("required"))}
    return any(
        _are_disjoint(_own(part)[name], _own(other)[name], root, depth + 1)
        for part, other in product(parts, others)
        for name in names & _own(part).keys() & _own(other).keys()
    )


def _excludes_options(part: Mapping[str, Any], other: Any, root: Any, depth: int) -> bool:
    """Returns whether certainly no value of another schema is valid under any option of a schema that has options."""
    return any(
        isinstance(options := part.get(keyword), list)
        and options
        and all(_are_disjoint(option, other, root, depth + 1) for option in options)
        for keyword in ("anyOf", "oneOf")
    )


def _are_disjoint_arrays(first: Mapping[str, Any], second: Mapping[str, Any], root: Any, depth: int) -> bool:
    if "prefixItems" in {**first, **second}:
        return False
    return _are_disjoint(first.get("items", True), second.get("items", True), root, depth + 1)


def _look_aheads(at: Spot) -> Schema | None:
    pattern = at.node.get("pattern")
    more = at.rewriter.searches(pattern, f"{at.place}/pattern")[1:] if isinstance(pattern, str) else ()
    kind = {"type": at.out["type"]} if "type" in at.out else {}
    return {"allOf": [{**kind, "pattern": search} for search in more]} if more else None


def _negation(at: Spot) -> Schema | None:
    if "not" not in at.node:
        return None
    result = negated(at.rewriter.inlined(at.node["not"], f"{at.place}/not"))
    if result is None:
        raise at.unsupported("not")
    return result


def _condition(at: Spot) -> Schema | None:
    if "if" not in at.node or not at.node.keys() & {"then", "else"}:
        return None
    then, other = (at.rewriter.schema(at.node.get(key, True), f"{at.place}/{key}") for key in ("then", "else"))
    if then in (True, {}) and other in (True, {}):
        return None
    condition = at.rewriter.inlined(at.node["if"], f"{at.place}/if")
    opposite = negated(condition)
    if opposite is None:
        raise at.unsupported("if")
    options = [_both(condition, then), _both(opposite, other)]
    options = [option for option in options if option is not False]
    return _any_of(options)


def _dependent(at: Spot) -> Schema | None:
    parts: list[Schema] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in at.rewriter.map(at.node.get(keyword, {}), f"{at.place}/{keyword}"):
            schema = {"required": needed} if isinstance(needed, list) else needed
            schema = at.rewriter.schema(schema, f"{at.place}/{keyword}/{name}")
            if schema not in ({}, True, {"required": []}):
                parts.append(_any_of([{"properties": {name: False}}, schema]))
    return {"allOf": parts} if parts else None


def _contains(at: Spot) -> Schema | None:
    if "contains" not in at.node:
        return None
    least, most = at.node.get("minContains", 1), at.node.get("maxContains")
    if least == 0 and most is None:
        return None
    inner = at.rewriter.schema(at.node["contains"], f"{at.place}/contains")
    if inner in (True, {}):
        bounds = {"minItems": int(least)} | ({} if most is None else {"maxItems": int(most)})
        return bounds if "type" not in at.out else {"type": at.out["type"], **bounds}
    if inner is False and least:
        return _without("array")
    if inner is False or (most is None and inner == at.out.get("items") and "prefixItems" not in at.out):
        return {"minItems": int(least)}
    raise at.unsupported("contains")


def _unique(at: Spot) -> Schema | None:
    most = at.out.get("maxItems")
    if at.node.get("uniqueItems") is not True or (isinstance(most, int) and most <= 1):
        return None
    if "array" not in (at.out.get("type", "array"), *_as_list(at.out.get("type"))):
        return None
    values = _values(resolved(at.node.get("items", True), at.rewriter.root))
    if values is None or len(values) > _MAX_UNIQUE or "prefixItems" in at.out:
        at.rewriter.ignored.add("uniqueItems")
        return None
    lengths = range(at.out.get("minItems", 0), min(len(values), len(values) if most is None else most) + 1)
    arrays = [list(array) for length in lengths for array in permutations(values, length)]
    return {"enum": arrays} if at.out.get("type") == "array" else _any_of([_without("array"), {"enum": arrays}])


def _names_of_properties(at: Spot) -> Schema | None:
    if "propertyNames" not in at.node:
        return None
    place = f"{at.place}/propertyNames"
    rule = at.rewriter.inlined(at.node["propertyNames"], place)
    if isinstance(rule, dict) and "string" in (rule.get("type", "string"), *_as_list(rule.get("type"))):
        rule = {key: value for key, value in rule.items() if key not in ("type", "format")}
    elif isinstance(rule, dict):
        rule = False  # no name is of another type
    if rule in (True, {}):
        return None
    if rule is False:
        return {"maxProperties": 0}
    values = _values(rule)
    if values is not None and rule.keys() <= {"enum", "const"}:
        return _only_named(at, [value for value in values if isinstance(value, str)], place)
    if not rule.keys() <= _STRING_KEYWORDS or ("pattern" in rule and len(rule) > 1) or at.out.get("patternProperties"):
        raise at.rewriter.error(f"{place} with {', '.join(sorted(rule))} is not supported here")
    pattern = rule.get("pattern")
    if pattern is None:
        pattern = f"^(?s:.{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}})$"
    # A schema of an object's properties by name, and by pattern: the names have to match the pattern too.
    properties = at.out.get("properties", {})
    if properties:
        raise at.rewriter.error(f"{place} with {', '.join(sorted(rule))} is not supported beside properties")
    at.out["patternProperties"] = {pattern: at.out.get("additionalProperties", True)}
    at.out["additionalProperties"] = False
    return None


def _only_named(at: Spot, names: Sequence[str], place: str) -> None:
    """Allows properties of these names only."""
    if at.out.get("patternProperties"):
        raise at.rewriter.error(f"{place} is not supported beside patternProperties")
    properties, more = at.out.get("properties", {}), at.out.get("additionalProperties", True)
    at.out["properties"] = {name: value if name in names else False for name, value in properties.items()}
    at.out["properties"] |= {name: more for name in names if name not in properties}
    at.out["additionalProperties"] = False


def _unevaluated(at: Spot) -> Schema | None:
    for key, rest in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        rule = at.rewriter.schema(at.node.get(key, True), f"{at.place}/{key}")
        if rule in (True, {}) or rest in at.out:
            continue
        if not any(keyword in at.node for keyword in _APPLICATORS):
            at.out[rest] = rule
        elif key == "unevaluatedProperties" and (known := _evaluated(at.rewriter.root, at.node, set())) is not None:
            at.out["properties"] = {
                **at.out.pop("properties", {}),
                **{n: True for n in known if n not in _own(at.node)},
            }
            at.out[rest] = rule
        else:
            raise at.unsupported(key)
    return None


def _evaluated(root: Any, node: Any, seen: set[int]) -> dict[str, None] | None:
    """Returns the properties that a schema and its references name; None if they depend on the object."""
    if not isinstance(node, Mapping) or id(node) in seen:
        return {}
    seen.add(id(node))
    if node.keys() & {"anyOf", "oneOf", "if", "dependentSchemas", "dependencies"}:
        return None
    inner = [*node.get("allOf", ()), *([target(node["$ref"], root)] if "$ref" in node else ())]
    found = dict.fromkeys(_own(node))
    for part in inner:
        if isinstance(part, Mapping) and part.keys() & {"additionalProperties", "patternProperties"}:
            return None
        names = _evaluated(root, part, seen)
        if names is None:
            return None
        found |= names
    return found


def _few_properties(at: Spot) -> None:
    """Refuses a minimum that needs properties without a name: they may be repeated, and parsers keep one."""
    least, required = at.out.get("minProperties"), at.out.get("required")
    if isinstance(least, int) and least > (len(required) if isinstance(required, list) else 0) + 1:
        raise at.rewriter.error(
            f"minProperties={least} is not supported beyond the required properties and one more: name them in required"
        )


RULES: tuple[Callable[[Spot], Schema | None], ...] = (
    _alternatives,
    _look_aheads,
    _unevaluated,
    _names_of_properties,
    _few_properties,
    _negation,
    _condition,
    _dependent,
    _contains,
    _unique,
)


def _own(node: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = node.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _both(first: Schema, second: Schema) -> Schema:
    if first is False or second is False:
        return False
    parts = [part for part in (first, second) if part not in (True, {})]
    return {"allOf": parts} if parts else True


def _any_of(options: list[Schema]) -> Schema:
    return options[0] if len(options) == 1 else {"anyOf": options}


def _without(name: str) -> dict[str, Any]:
    """Values that are not of a type."""
    return {"type": [other for other in _TYPES if other != name]}


def _values(schema: Any) -> list[Any] | None:
    """Returns the values that a schema allows at most, if it lists them."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return schema["enum"]
    return [True, False] if schema.get("type") == "boolean" else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
