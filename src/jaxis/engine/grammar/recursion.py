"""Schemas of a document that refer to themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxis.parsing.json_schema import ANNOTATIONS, DEFINITIONS
from jaxis.parsing.schema_references import DATA, target


class Recursion:
    """The references of one document, which are JSON pointers.

    Args:
      root: The document.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets_in: dict[int, list[Any]] = {}  # by id of a target

    def is_circular(self, node: Any) -> bool:
        """Returns whether a value has to be valid under a schema in order to be valid under it; `anyOf` is left out."""
        left, seen = [node], dict[int, Any]()
        while left:
            for part in self._of_same_value(left.pop()):
                if part is node:
                    return True
                if id(part) not in seen:
                    seen[id(part)] = part
                    left.append(part)
        return False

    def is_joined(self, node: Mapping[str, Any]) -> bool:
        """Returns whether a schema is a recursive one and something beside it."""
        own = node.keys() - ANNOTATIONS - DEFINITIONS
        beside_all = node.get("allOf")
        if "$ref" not in own and not isinstance(beside_all, list):
            return False
        if own == {"$ref"} or (own == {"allOf"} and isinstance(beside_all, list) and len(beside_all) < 2):
            return False
        left, seen = [node], set[int]()
        while left:
            part = left.pop()
            if not isinstance(part, Mapping):
                continue
            inner = part.get("allOf")
            left += inner if isinstance(inner, list) else []
            found = self._target(part)
            if found is not None and id(found) not in seen:
                if self._is_recursive(found):
                    return not self.is_circular(found)
                seen.add(id(found))
                left.append(found)
        return False

    def _is_recursive(self, node: Any) -> bool:
        left, seen = [node], set[int]()
        while left:
            for found in self._targets(left.pop()):
                if found is node:
                    return True
                if id(found) not in seen:
                    seen.add(id(found))
                    left.append(found)
        return False

    def _targets(self, node: Any) -> list[Any]:
        """Returns the targets of the references in a schema."""
        if id(node) not in self._targets_in:
            parts = _schemas_in(node)
            self._targets_in[id(node)] = [each for part in parts if (each := self._target(part)) is not None]
        return self._targets_in[id(node)]

    def _target(self, node: Mapping[str, Any]) -> Any:
        reference = node.get("$ref")
        return target(reference, self._root) if isinstance(reference, str) else None

    def _of_same_value(self, node: Any) -> list[Any]:
        if not isinstance(node, Mapping):
            return []
        listed = [part for key in ("allOf", "oneOf") if isinstance(node.get(key), list) for part in node[key]]
        parts = [*listed, *(node[key] for key in ("not", "if", "then", "else") if key in node)]
        return [*parts, self._target(node)]


def _schemas_in(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and, at any depth, the objects in it, but for data and definitions."""
    left = [node]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, Mapping):
            yield part
            left += (value for key, value in part.items() if key not in DATA and key not in DEFINITIONS)
