"""Requests of /v1/responses that continue stored responses, and whose answers are stored."""

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
from jaxis.server.openai.stored.database import Json
from jaxis.server.openai.stored.schema import input_items, stored_items
from jaxis.server.openai.stored.store import ResponseStore, current_owner

NOTHING_STORED = "nothing is stored here (--response-ttl 0): send the whole conversation in input"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request whose input begins with the items before it, and the function to call with its answer."""

    request: ResponseRequest
    record: Callable[[ResponseObject], None]


async def begin_turn(request: ResponseRequest, store: ResponseStore | None) -> Turn:
    """Looks up the responses that a request continues; a `store` of None stores nothing.

    Raises:
      ObjectNotFoundError: There is no such response or item, or it is another API key's.
      RequestError: Nothing is stored, or the request has too many items with those before it.
    """
    if store is None:
        if request.previous_response_id is not None:
            raise RequestError(f"cannot be honoured: {NOTHING_STORED}", param="previous_response_id")
        if any(isinstance(item, ItemReference) for item in request.input):
            raise RequestError(f"has an item_reference: {NOTHING_STORED}", param="input")
        return Turn(request.model_copy(update={"store": False}), lambda _: None)
    given = request.input
    new = [InputMessage(role="user", content=given)] if isinstance(given, str) else list(given)
    before = await _items_before(request, store)
    new = await _with_stored_items(new, store, {item.id for item in before if not isinstance(item, HostedCall)})
    if len(before) + len(new) >= MAX_MESSAGES:
        raise RequestError(f"has {len(before) + len(new)} items with those before it: begin anew", param="input")
    input_ = given if isinstance(given, str) and not before else [*before, *new]
    changed = request.model_copy(update={"store": request.store is not False, "input": input_})
    return Turn(changed, functools.partial(_record, changed, new, store, current_owner()))


async def _with_stored_items(items: Sequence[Any], store: ResponseStore, known: Container[str | None]) -> list[Any]:
    """Returns these items (`InputItem`), with stored ones in place of references to them.

    References to `known` items, which are there already, are left out. Raises ObjectNotFoundError if there is no such
    item, or it is another API key's.
    """
    items = [item for item in items if not (isinstance(item, ItemReference) and item.id in known)]
    wanted = [item.id for item in items if isinstance(item, ItemReference)]
    if not wanted:
        return items
    owner = current_owner()
    found = await store.call(lambda database: database.find_items(owner, wanted))
    for item_id in wanted:
        if item_id not in found:
            raise not_found("item", item_id, "input")
    stored = dict(zip(found, input_items(list(found.values())), strict=True))
    return [stored[item.id] if isinstance(item, ItemReference) else item for item in items]


async def _items_before(request: ResponseRequest, store: ResponseStore) -> list[Any]:
    """Returns the items (`InputItem`) that a request continues."""
    if (previous := request.previous_response_id) is None:
        return []
    owner = current_owner()
    chain = await store.call(lambda database: database.chain(owner, previous))
    if chain is None:
        raise not_found("response", previous, "previous_response_id")
    return input_items([item for body, items in chain for item in (*items, *body["output"])])


def _record(
    request: ResponseRequest, new: Sequence[Any], store: ResponseStore, owner: str, response: ResponseObject
) -> None:
    """Stores an answer, with the request's new items."""
    if request.store:
        body: Json = response.model_dump(mode="json", by_alias=True)
        items, previous = stored_items(new), request.previous_response_id
        store.submit(lambda database: database.put(owner, response.id, body, items, previous))


def not_found(kind: str, object_id: str, param: str | None = None) -> ObjectNotFoundError:
    """Makes the error for an id that is unknown, expired, deleted or another API key's."""
    return ObjectNotFoundError(
        f"there is no {kind} {object_id[:100]!r}: it was never stored, has expired, or was deleted", param
    )
