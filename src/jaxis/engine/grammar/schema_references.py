"""Targets of references in a JSON schema, by JSON pointers, anchors and `$id`s of the same document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_MORE = frozenset({"type", "const", "enum", "pattern", "allOf", "anyOf", "oneOf", "properties", "required"})


class References:
    """Targets of a document's references.

    Args:
      root: The document.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] | None = None

    def target(self, reference: str, node: Mapping[str, Any]) -> Any:
        """Returns the target of a reference; None if there is none."""
        if self._resources is None:
            self._resources = {"": self._root}
            self._index(self._root, "", self._resources)
        url, fragment = urldefrag(urljoin(self._bases.get(id(node), ""), reference))
        if reference.startswith("#"):
            url = self._bases.get(id(node), "")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._resources.get(f"{url}#{fragment}")
        place = self._resources.get(url)
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping):
                place = place.get(part)
            elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
                place = place[int(part)]
            else:
                return None
        return place if isinstance(place, Mapping | bool) else None

    def _index(self, schema: Any, base: str, resources: dict[str, Any]) -> None:
        """Records the base of each schema's references, and the schemas that have names."""
        left = [(schema, base)]
        while left:
            node, base = left.pop()
            if isinstance(node, list):
                left += [(item, base) for item in node]
            if not isinstance(node, Mapping):
                continue
            identifier = node.get("$id")
            if isinstance(identifier, str) and identifier.startswith("#"):
                resources.setdefault(base + identifier, node)
            elif isinstance(identifier, str):
                base = urldefrag(urljoin(base, identifier))[0]
                resources.setdefault(base, node)
            self._bases[id(node)] = base
            for anchor in ("$anchor", "$dynamicAnchor"):
                resources.setdefault(f"{base}#{node.get(anchor)}", node)
            for key, value in node.items():
                if key in _NAMED and isinstance(value, Mapping):
                    left += [(item, base) for item in value.values()]
                elif key not in _DATA:
                    left.append((value, base))

    def followed(self, node: Any) -> Any:
        """Returns a schema, or the target of its reference if it has no other keyword."""
        seen: set[int] = set()
        while isinstance(node, Mapping) and isinstance(reference := node.get("$ref"), str) and id(node) not in seen:
            seen.add(id(node))
            if node.keys() & _MORE:
                return node
            node = self.target(reference, node)
        return node
