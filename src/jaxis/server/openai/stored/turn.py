"""Requests of /v1/responses that continue stored objects, and whose answers are stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.http.errors import ObjectNotFoundError
from jaxis.server.openai.chat_schema import MAX_MESSAGES
from jaxis.server.openai.response_items import HostedCall, InputMessage, ItemReference
from jaxis.server.openai.response_schema import ResponseObject, ResponseRequest
from jaxis.server.openai.stored.database import Database, Json
from jaxis.server.openai.stored.schema import input_items, stored_items
from jaxis.server.openai.stored.store import ResponseStore, current_owner

NOTHING_STORED = "nothing is stored here (--response-ttl 0): send the whole conversation in input"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request whose input begins with the items before it, and the function to call with its answer."""

    request: ResponseRequest
    record: Callable[[ResponseObject], None]


async def begin_turn(request: ResponseRequest, store: ResponseStore | None) -> Turn:
    """Looks up the objects that a request continues; a `store` of None stores nothing.

    Raises:
      ObjectNotFoundError: There is no such response, conversation or item, or it is another API key's.
      RequestError: Both a response and a conversation are named, or nothing is stored.
    """
    if store is None:
        for name in ("previous_response_id", "conversation"):
            if getattr(request, name) is not None:
                raise RequestError(f"cannot be honoured: {NOTHING_STORED}", param=name)
        if isinstance(request.input, list):
            await with_stored_items(request.input, store, "input")
        return Turn(request.model_copy(update={"store": False}), lambda _: None)
    if request.previous_response_id is not None and request.conversation_id is not None:
        raise RequestError(
            "cannot be sent with conversation, which knows its responses: send one", param="previous_response_id"
        )
    given = request.input
    new = [InputMessage(role="user", content=given)] if isinstance(given, str) else list(given)
    before = await _items_before(request, store)
    new = await with_stored_items(new, store, "input", {item.id for item in before if not isinstance(item, HostedCall)})
    if len(before) + len(new) >= MAX_MESSAGES:
        raise RequestError(f"has {len(before) + len(new)} items with those before it: begin anew", param="input")
    input_ = given if isinstance(given, str) and not before else [*before, *new]
    changed = request.model_copy(update={"store": request.store is not False, "input": input_})
    return Turn(changed, functools.partial(_record, changed, new, store, current_owner()))


async def with_stored_items(
    items: Sequence[Any], store: ResponseStore | None, param: str, known: Container[str | None] = ()
) -> list[Any]:
    """Returns these items (`InputItem`), with stored ones in place of references to them.

    Args:
      items: Items of the request.
      store: Stored objects; None stores nothing.
      param: Name of the field with the items.
      known: Ids of items that are there already: references to them are left out.

    Raises:
      ObjectNotFoundError: There is no such item, or it is another API key's.
      RequestError: An item is a reference, and nothing is stored.
    """
    if not any(isinstance(item, ItemReference) for item in items):
        return list(items)
    if store is None:
        raise RequestError(f"has an item_reference: {NOTHING_STORED}", param=param)
    items = [item for item in items if not (isinstance(item, ItemReference) and item.id in known)]
    wanted = [item.id for item in items if isinstance(item, ItemReference)]
    owner = current_owner()
    found = await store.call(lambda database: database.find_items(owner, wanted))
    for item_id in wanted:
        if item_id not in found:
            raise not_found("item", item_id, param)
    stored = dict(zip(found, input_items(list(found.values())), strict=True))
    return [stored[item.id] if isinstance(item, ItemReference) else item for item in items]


async def _items_before(request: ResponseRequest, store: ResponseStore) -> list[Any]:
    """Returns the items (`InputItem`) that a request continues."""
    owner = current_owner()
    if (previous := request.previous_response_id) is not None:
        chain = await store.call(lambda database: database.chain(owner, previous))
        if chain is None:
            raise not_found("response", previous, "previous_response_id")
        return input_items([item for body, items in chain for item in (*items, *body["output"])])
    if (conversation := request.conversation_id) is not None:
        items = await store.call(lambda database: database.items(owner, "conversation", conversation))
        if items is None:
            raise not_found("conversation", conversation, "conversation")
        return input_items(items)
    return []


def _record(
    request: ResponseRequest, new: Sequence[Any], store: ResponseStore, owner: str, response: ResponseObject
) -> None:
    """Stores an answer, with the request's new items."""
    conversation = request.conversation_id
    if not request.store and conversation is None:
        return
    body: Json = response.model_dump(mode="json", by_alias=True)
    items = stored_items(new)

    def write(database: Database) -> None:
        if request.store:
            database.put(owner, "response", response.id, body, items, request.previous_response_id)
        if conversation is not None:
            database.add_items(owner, conversation, [*items, *body["output"]])

    store.submit(write)


def not_found(kind: str, object_id: str, param: str | None = None) -> ObjectNotFoundError:
    """Makes the error for an id that is unknown, expired, deleted or another API key's."""
    return ObjectNotFoundError(
        f"there is no {kind} {object_id[:100]!r}: it was never stored, has expired, or was deleted", param
    )
