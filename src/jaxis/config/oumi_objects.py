"""Protocols of Oumi's own objects, which are accepted without importing Oumi."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, Self, runtime_checkable


class OumiParams(Protocol):
    """A group of parameters: a dataclass with the same field names as the group in jaxis."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


@runtime_checkable
class PydanticObject(Protocol):
    """Any pydantic object."""

    def model_dump(self, *, mode: str, exclude_none: bool) -> Any: ...


@runtime_checkable
class OumiConversation(PydanticObject, Protocol):
    """A conversation: a pydantic object that can be rebuilt."""

    @classmethod
    def model_validate(cls, obj: dict[str, Any], /) -> Self: ...
