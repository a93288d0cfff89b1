"""Rewriting of JSON schemas for llguidance.

Keywords that constrain nothing are left out. Keywords that llguidance lacks are expressed by others where possible.
Only schemas are read: never the data in `const`, `enum`, `default` or `examples`. The result is of draft 2020-12, and
its references lead to `$defs` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import urldefrag

from jaxis.engine.grammar.negated_schema import Schema
from jaxis.engine.grammar.recursion import Recursion
from jaxis.engine.grammar.schema_rules import RULES, Spot
from jaxis.errors import RequestError
from jaxis.parsing.ecma_pattern import PatternError
from jaxis.parsing.ecma_regex import rust_searches
from jaxis.parsing.json_schema import conjuncts, resolved
from jaxis.parsing.schema_references import target, with_pointers

# "multipleOf: N" needs an automaton of N states, and several of these constraints multiply.
MAX_MULTIPLE_OF = 100_000
_MAX_MULTIPLE_OF_EXPONENT = 15
_MAX_INTEGER = 2**63 - 1
_MAX_EXACT = 2**63 - 1024  # the largest float64 of 64 bits
_MAX_FLOAT = 10**308
_MAX_NUMBER = 10**18  # as a bound of numbers that need not be whole
_EXACT_INTEGER = 2**53
_MAX_ERROR_PATTERN = 100
_MAX_INLINED = 1000  # schemas that are written again, of which each may have others
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_OTHER_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "uri-reference", "uri-template", "iri", "iri-reference"}
    | {"json-pointer", "relative-json-pointer", "regex"}
)
_UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def rewritten(schema: Any, name: str) -> tuple[Schema, set[str]]:
    """Returns an equivalent schema, and the names of keywords that it does not ensure, such as "uniqueItems".

    Args:
      schema: Schema, parsed from JSON.
      name: The request's parameter, for errors.

    Raises:
      RequestError: The schema is invalid, or a grammar cannot express it.
    """
    try:
        rewriter = _Rewriter(with_pointers(schema), name)
        return rewriter.document(), rewriter.ignored
    except RecursionError:
        raise RequestError(
            ": a keyword of a schema refers to that schema, or is nested too deeply", param=name
        ) from None


class _Rewriter:
    """Rewriter of the schemas of one document."""

    def __init__(self, root: Any, name: str) -> None:
        self.ignored: set[str] = set()
        self.root = root
        self._name = name
        self._num_inlined = 0
        self._multiples: list[Decimal] = []
        self._definitions: dict[str, Schema] = {}
        self._names: dict[tuple[str, int], tuple[str, Any]] = {}  # with the schema, so that no other gets its id
        self._waiting: list[tuple[str, Any]] = []
        self._recursion = Recursion(root)

    def document(self) -> Schema:
        result = self.schema(self.root, "#")
        while self._waiting:
            name, node = self._waiting.pop()
            self._definitions[name] = self.schema(node, f"$defs {name}")
        if self._multiples and not _is_small_multiple(self._multiples):
            digits = len(str(MAX_MULTIPLE_OF)) - 1
            raise self.error(
                f"multipleOf is supported where the least common multiple of all its values has at most {digits} digits"
            )
        if self._definitions and isinstance(result, dict):
            result["$defs"] = self._definitions
        return result

    def error(self, message: str) -> RequestError:
        return RequestError(f": {message}", param=self._name)

    def schema(self, node: Any, place: str) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise self.error(f"{place} must be a schema, an object or a boolean")
        joined = self._joined(node)
        return self._written(node, place) if joined is None else joined

    def _written(self, node: Mapping[str, Any], place: str) -> Schema:
        out: dict[str, Any] = {}
        for key, value in node.items():
            out |= self._keyword(key, value, node, f"{place}/{key}")
        spot = Spot(self, node, out, place)
        more = [part for rule in RULES if (part := rule(spot)) not in (None, True)]
        if False in more:
            return False
        if more:
            out["allOf"] = [*out.get("allOf", ()), *more]
        return out

    def inlined(self, node: Any, place: str) -> Schema:
        self._num_inlined += 1
        if self._num_inlined > _MAX_INLINED:
            raise self.error(
                f"{place} is one of more than {_MAX_INLINED} schemas in not, if, oneOf and propertyNames: use fewer"
            )
        node = resolved(node, self.root)
        return self._written(node, place) if isinstance(node, Mapping) else self.schema(node, place)

    def _keyword(self, key: str, value: Any, node: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Rewrites a keyword that llguidance knows, in its place; `RULES` rewrite the others."""
        match key:
            case "type" | "required":
                return {key: value}
            case "const" | "enum":
                self._check_data(value, place)
                return {key: value}
            case "pattern":
                return {key: self.searches(value, place)[0] if isinstance(value, str) else value}
            case "format":
                return self._format(value)
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return {"$ref": self._reference(key, value, place)}
        return self._number(key, value, node) or self._inner(key, value, node, place)

    def _format(self, name: Any) -> dict[str, Any]:
        if name in _OTHER_FORMATS:
            self.ignored.add(f"format.{name}")
        return {"format": name} if name in _FORMATS else {}

    def _number(self, key: str, value: Any, node: Mapping[str, Any]) -> dict[str, Any]:
        if key in _COUNTS:
            return {key: int(value) if isinstance(value, float) and value.is_integer() else value}
        if key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            return {key: self._bound(key, value, is_integer=node.get("type") == "integer")}
        if key != "multipleOf":
            return {}
        if _is_number(value) and value:
            self._multiples.append(Decimal(str(value)))
        return {key: value}

    def _inner(self, key: str, value: Any, node: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Rewrites a keyword whose value is made of schemas; returns nothing for an unknown one."""
        match key:
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                return {key: self._listed(value, place)}
            case "items" if isinstance(value, list):
                return {"prefixItems": self._listed(value, place)}
            case "items" | "additionalProperties":
                return {key: self.schema(value, place)}
            case "additionalItems" if isinstance(node.get("items"), list):
                return {"items": self.schema(value, place)}
            case "properties":
                return {key: {name: self.schema(item, f"{place}/{name}") for name, item in self.map(value, place)}}
            case "patternProperties":
                found: dict[str, Any] = {}
                for pattern, item in self.map(value, place):
                    written, schema = self._one_search(pattern, place), self.schema(item, f"{place}/{pattern}")
                    found[written] = schema if written not in found else {"allOf": [found[written], schema]}
                return {key: found}
        return {}

    def map(self, value: Any, place: str) -> Iterable[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            raise self.error(f"{place} must be an object")
        return value.items()

    def _listed(self, value: Any, place: str) -> list[Schema]:
        if not isinstance(value, list):
            raise self.error(f"{place} must be an array")
        return [self.schema(item, f"{place}/{i}") for i, item in enumerate(value)]

    # Values.

    def _one_search(self, pattern: str, place: str) -> str:
        searches = self.searches(pattern, place)
        if len(searches) > 1:
            raise self.error(
                f"{place}={_shown(pattern)} cannot be honoured: look-ahead (?...) is not supported in names"
            )
        return next(iter(searches))

    def searches(self, pattern: str, place: str) -> tuple[str, ...]:
        """Returns patterns in the syntax of Rust: all of them must be found."""
        try:
            return rust_searches(pattern)
        except PatternError as error:
            raise self.error(f"{place}={_shown(pattern)} cannot be honoured: {error} is not supported") from None

    def _bound(self, key: str, bound: Any, *, is_integer: bool) -> Any:
        """Returns a bound, or the next one inward that survives llguidance's conversion to float64, and to 64 bits."""
        if not _is_number(bound) or bound != math.floor(bound):
            return bound
        sign = 1 if key in ("minimum", "exclusiveMinimum") else -1
        if sign * bound >= _MAX_INTEGER:
            raise self.error(f"{key}={Decimal(bound):.6g} is not supported: it needs more than 64 bits")
        furthest = _MAX_EXACT if is_integer else _MAX_NUMBER
        if abs(bound) > furthest and sign * bound < 0:
            # llguidance takes a maximum that is too large for the largest integer, but no such minimum.
            is_taken = is_integer and sign < 0 and bound < _MAX_FLOAT
            return bound if is_taken else -sign * furthest
        nearest = float(bound)
        if int(nearest) == bound:
            return bound
        outside = sign * int(nearest) < sign * bound
        return int(math.nextafter(nearest, sign * math.inf) if outside else nearest)

    def _check_data(self, value: Any, place: str) -> None:
        """Refuses numbers that llguidance would write differently."""
        left = [value]
        while left:
            value = left.pop()
            if _is_number(value) and abs(value) > _EXACT_INTEGER and value == math.floor(value):
                raise self.error(f"{place}={Decimal(value):.6g} is not supported: it needs more than 53 bits")
            left += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()

    # References.

    def _reference(self, key: str, value: Any, place: str) -> str:
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string")
        node = target(value, self.root) if key == "$ref" else None
        if node is None:
            why = "nothing is ever fetched" if urldefrag(value)[0] else "there is no such place"
            why = (
                f"leads out of the schema: {why}" if key == "$ref" else "has no one target: it depends on the way there"
            )
            raise self.error(f"{key}={_shown(value)} {why}; refer to #/$defs/...")
        if ("d", id(node)) not in self._names and self._recursion.is_circular(node):
            raise self.error(f"{place}={_shown(value)} is circular: it says of a value what it says of that value")
        return "#" if node is self.root else self._defined("d", node, node)

    def _defined(self, kind: str, node: Any, schema: Any) -> str:
        """Returns a reference to the definition of a schema, which is written the first time that this is asked for.

        Args:
          kind: Kind of the definition.
          node: Schema of the document that it is made of.
          schema: The schema itself.
        """
        if (kind, id(node)) not in self._names:
            self._names[kind, id(node)] = f"{kind}{len(self._names)}", node
            self._waiting.append((self._names[kind, id(node)][0], schema))
        return f"#/$defs/{self._names[kind, id(node)][0]}"

    def _joined(self, node: Mapping[str, Any]) -> Schema | None:
        """Returns a reference to what a recursive schema and the keywords beside it say together; None if none are.

        llguidance knows no keywords beside a recursive reference.
        """
        if not self._recursion.is_joined(node):
            return None
        parts = conjuncts(node, self.root)
        if any(isinstance(part, Mapping) and part.keys() & _UNEVALUATED for part in parts):
            return None  # which depend on the schemas beside them
        return {"$ref": self._defined("j", node, {"allOf": parts})}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_small_multiple(multiples: list[Decimal]) -> bool:
    # Parsed from JSON, so they are finite, and their exponents are numbers.
    exponents = [int(multiple.as_tuple().exponent) for multiple in multiples]
    if max(abs(m.adjusted()) for m in multiples) > _MAX_MULTIPLE_OF_EXPONENT:
        return False
    if min(exponents) < -_MAX_MULTIPLE_OF_EXPONENT:
        return False
    scale = 10 ** max(0, -min(exponents))
    return math.lcm(*(int(multiple * scale) for multiple in multiples)) <= MAX_MULTIPLE_OF


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_ERROR_PATTERN else text[:_MAX_ERROR_PATTERN] + "...")
