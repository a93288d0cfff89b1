"""Nested mappings as pairs of dotted names and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def by_dotted_name(tree: Mapping[Any, Any] | Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a mapping, or of pairs, that are no mappings themselves, as ("outer.inner", value)."""
    for name, value in tree.items() if isinstance(tree, Mapping) else tree:
        if isinstance(value, Mapping):
            yield from by_dotted_name(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
