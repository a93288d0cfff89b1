"""Bodies of requests and answers: pydantic models that check types strictly, and rules for fields without effect."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from jaxis.sampling_params import Bounds

MAX_INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]


def bounded(bounds: Bounds, *, high: float | None = None) -> Any:
    """Returns a field with a parameter's bounds, None by default. `high` replaces a missing upper bound."""
    return Field(None, ge=bounds.low, le=bounds.high if high is None else high)


@dataclass(frozen=True)
class NotApplied:
    """Rule for a field that clients send and this server does not apply.

    A field that cannot change the answer is accepted. A field that would change it is accepted only at values that ask
    for nothing, and is otherwise refused, since a client could not tell that it was left out.

    Attributes:
      neutral: Values that ask for nothing, in addition to null.
      advice: Advice in the error that refuses other values. None accepts other values, and reports the field as
        ignored.
    """

    neutral: tuple[object, ...] = ()
    advice: str | None = None


class StrictModel(BaseModel):
    """Refuses unknown fields and converts no types: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LenientModel(StrictModel):
    """Checks the declared fields and accepts unknown ones, since new releases of clients add fields.

    `server.http.ignored_fields` reports fields without effect, and refuses those that would change the answer.

    Attributes:
      not_applied: Rules for fields that are not applied, declared or not. Other unknown fields have no effect.
    """

    model_config = ConfigDict(extra="allow")
    not_applied: ClassVar[dict[str, NotApplied]] = {}
    _unknown_fields: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, _context: Any) -> None:
        """Keeps undeclared fields out of `model_dump`, and so out of prompts."""
        if extra := self.__pydantic_extra__:
            self._unknown_fields = dict(extra)
            extra.clear()

    @property
    def unknown_fields(self) -> Mapping[str, Any]:
        """Undeclared fields of this object, without those of objects inside it."""
        # A private attribute is slow to read, and requests have thousands of objects.
        return (self.__pydantic_private__ or {}).get("_unknown_fields", {})


def new_id(kind: str) -> str:
    """Returns a unique id, such as "chatcmpl-..."."""
    return f"{kind}-{uuid.uuid4().hex}"


def is_none(value: object) -> bool:
    return value is None


def type_of(value: object) -> Any:
    """Returns the `type` of a JSON object, or of a model made from one."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
