"""References in JSON schemas: by JSON pointers, anchors, `$id`s, and dynamic ones. All of them can be JSON pointers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies"})
DATA = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are data, not schemas."""
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
# A schema's name, or a reference that is not a JSON pointer: tells of most documents quickly that they have none.
_NAME = re.compile(r'"\$(?:id|anchor|dynamic|recursive)|"\$ref": "(?!#[/"])')
_PLACES = frozenset({"$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})


def target(reference: str, root: object) -> Any:
    """Returns the schema, a mapping or a boolean, that a JSON pointer leads to; None if there is none."""
    fragment = unquote(reference[1:])
    if not reference.startswith("#") or not (fragment == "" or fragment.startswith("/")):
        return None
    place = root
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, Mapping) and key in place:
            place = place[key]
        else:
            return None
    return place if isinstance(place, Mapping | bool) else None


def with_pointers(document: Any) -> Any:
    """Returns a document with every reference as a `$ref` with a JSON pointer, and without names of places.

    A dynamic reference leads where it does if the document itself is what is validated. References that lead out of the
    document, or depend on where they are reached from, stay as they are. A `$recursiveAnchor` inside a resource has no
    meaning; it is read as OpenAPI documents mean it: `$recursiveRef` below refers to its schema.
    """
    if not _NAME.search(json.dumps(document, default=str)):
        return document
    return _Places(document).rewritten(document, "")


class _Places:
    """Places of a document that have names."""

    def __init__(self, document: Any) -> None:
        self._pointers: dict[str, str] = {"": ""}  # by URL, with the anchor
        self._dynamic: dict[str, dict[str, str]] = {}  # by anchor, and by the URL of the anchor's resource
        self._recursive: dict[int, str] = {}  # by id
        self._root_base = _base(document, "")
        left: list[tuple[Any, str, str]] = [(document, "", "")]
        while left:
            node, base, pointer = left.pop()
            items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, Mapping) else ()
            if isinstance(node, Mapping):
                base = self._note(node, base, pointer)
            for key, value in items:
                place = f"{pointer}/{_escaped(str(key))}"
                if key in _NAMED and isinstance(value, Mapping):
                    left += [(item, base, f"{place}/{_escaped(name)}") for name, item in value.items()]
                elif key not in DATA and isinstance(value, Mapping | list):
                    left.append((value, base, place))

    def _note(self, node: Mapping[str, Any], base: str, pointer: str) -> str:
        """Notes the names of a schema. Returns the URL that its references are relative to."""
        own = _base(node, base)
        if node.keys() & _PLACES:
            identifier, anchor, dynamic = (node.get(key) for key in ("$id", "$anchor", "$dynamicAnchor"))
            if isinstance(identifier, str):
                self._pointers.setdefault(own + identifier if identifier.startswith("#") else own, pointer)
            for name in (anchor, dynamic):
                self._pointers.setdefault(f"{own}#{name}", pointer)
            is_recursive = node.get("$recursiveAnchor") is True
            if is_recursive and self._pointers.get(own) != pointer:
                self._recursive[id(node)] = pointer
            for name in (dynamic, "" if is_recursive and id(node) not in self._recursive else None):
                if isinstance(name, str):
                    self._dynamic.setdefault(name, {}).setdefault(own, pointer)
        return own

    def rewritten(self, node: Any, base: str, recursive: str | None = None) -> Any:
        if isinstance(node, list):
            return [self.rewritten(item, base, recursive) for item in node]
        if not isinstance(node, Mapping):
            return node
        base, recursive = _base(node, base), self._recursive.get(id(node), recursive)
        result: dict[str, Any] = {}
        pointers: list[str] = []
        for key, value in node.items():
            if key in _NAMED and isinstance(value, Mapping):
                result[key] = {name: self.rewritten(item, base, recursive) for name, item in value.items()}
            elif key == "$recursiveRef" and recursive is not None:
                pointers.append(f"#{recursive}")
            elif key in _REFERENCES and (pointer := self._pointer(key, value, base)) is not None:
                pointers.append(f"#{pointer}")
            elif key not in _PLACES:
                result[key] = value if key in DATA else self.rewritten(value, base, recursive)
        if pointers:
            result["$ref"] = pointers.pop(0)
        if pointers:
            result["allOf"] = [*result.get("allOf", ()), *({"$ref": pointer} for pointer in pointers)]
        return result

    def _pointer(self, key: str, reference: object, base: str) -> str | None:
        if not isinstance(reference, str):
            return None
        url, fragment = (base, reference[1:]) if reference.startswith("#") else _joined(base, reference)
        anchor = unquote(fragment)
        if anchor and not anchor.startswith("/"):
            pointer = self._pointers.get(f"{url}#{anchor}")
        else:
            pointer = self._pointers.get(url)
            pointer = None if pointer is None else pointer + fragment
        dynamic = self._dynamic.get(anchor, {})
        if key == "$ref" or pointer not in dynamic.values():
            return pointer
        # The outermost schema with this anchor is meant, and none is further out than the root.
        return dynamic.get(self._root_base, pointer if len(dynamic) == 1 else None)


def _base(node: Any, base: str) -> str:
    identifier = node.get("$id") if isinstance(node, Mapping) else None
    if not isinstance(identifier, str) or identifier.startswith("#"):
        return base
    return _joined(base, identifier)[0]


def _joined(base: str, reference: str) -> tuple[str, str]:
    try:
        return urldefrag(urljoin(base, reference))
    except ValueError:  # such as an address with one bracket
        return reference, ""


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~$")
