"""Lists of stored items, and items in the form in which they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from jaxis.server.http.body import new_id
from jaxis.server.openai.response_items import HostedCall, InputItem, InputMessage
from jaxis.server.openai.stored.database import Json

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_KINDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class Deleted(BaseModel):
    """The id of a deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """Some items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Json], *, has_more: bool) -> ItemList:
        ids = [item["id"] for item in items]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return cls(data=list(items), first_id=first, last_id=last, has_more=has_more)


def stored_items(items: Sequence[Any]) -> list[Json]:
    """Converts items (`InputItem`) to their stored and listed form: each has an id, and messages have parts.

    Items that have no effect, since only another server has them, are left out.
    """
    stored = []
    for item in items:
        if isinstance(item, HostedCall):
            continue
        value = item.model_dump(mode="json", exclude_none=True)
        if isinstance(item, InputMessage):
            kind = "output_text" if item.role == "assistant" else "input_text"
            if isinstance(item.content, str):
                value["content"] = [{"type": kind, "text": item.content}]
            if kind == "output_text":  # clients read them
                value["content"] = [
                    {"annotations": [], **part} if part["type"] == kind else part for part in value["content"]
                ]
        value["status"] = item.status or "completed"
        value["id"] = item.id or new_id(_KINDS[value["type"]])
        stored.append(value)
    return stored


def input_items(stored: Sequence[Json]) -> list[Any]:
    """Converts stored items to those (`InputItem`) of a request."""
    return _ITEMS.validate_python(list(stored))
