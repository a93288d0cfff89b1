"""Unions of models that are told apart by their `type`, with tags that error messages leave out of paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def type_of(value: object) -> Any:
    """The `type` of an object of JSON, or of a model that was made of one."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def tag_by_type(tags: Mapping[str, str]) -> Callable[[Any], str | None]:
    """A discriminator: type -> the tag of its model, which begins with a capital; None for an unknown type."""

    def tag(value: object) -> str | None:
        kind = type_of(value)
        return tags.get(kind) if isinstance(kind, str) else None

    return tag
