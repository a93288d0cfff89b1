"""/v1/responses/{id} and /v1/conversations: stored objects, for their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse

from jaxis.errors import RequestError
from jaxis.server.context import Parts
from jaxis.server.http.openapi import TEXT_ERRORS, error_responses
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.openai.response_schema import ResponseObject
from jaxis.server.openai.stored.database import Database, Kind, Page
from jaxis.server.openai.stored.schema import (
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    Deleted,
    ItemList,
    NewItems,
    stored_items,
)
from jaxis.server.openai.stored.store import ResponseStore, Store, current_owner
from jaxis.server.openai.stored.turn import NOTHING_STORED, not_found, with_stored_items

Result = TypeVar("Result")
router = APIRouter(route_class=StrictJSONRoute, responses={**TEXT_ERRORS, **error_responses(500)})


def _page(
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Page:
    return Page(after, limit, order == "desc")


ItemPage = Annotated[Page, Depends(_page)]


async def _ask(store: ResponseStore | None, function: Callable[[Database, str], Result]) -> Result:
    """Returns a function's result for the current owner's objects."""
    if store is None:
        raise RequestError(f"this route has nothing to work on: {NOTHING_STORED}")
    owner = current_owner()
    return await store.call(lambda database: function(database, owner))


async def _found(
    store: ResponseStore | None, kind: str, object_id: str, function: Callable[[Database, str], Result | None]
) -> Result:
    """Returns a result as `_ask` does; raises an error if it is None or False, since there is no such object."""
    if not (result := await _ask(store, function)):
        raise not_found(kind, object_id)
    return result


async def _list(store: ResponseStore | None, kind: Kind, object_id: str, page: Page) -> ItemList:
    name = kind if page.after is None else f"{kind}, or item in it,"
    items, has_more = await _found(
        store, name, object_id, lambda database, owner: database.page(owner, kind, object_id, page)
    )
    return ItemList.of(items, has_more=has_more)


async def _conversation(store: ResponseStore | None, conversation_id: str) -> ConversationObject:
    return ConversationObject(**await _object(store, "conversation", conversation_id))


async def _object(store: ResponseStore | None, kind: Kind, object_id: str) -> dict[str, Any]:
    return await _found(store, kind, object_id, lambda database, owner: database.get(owner, kind, object_id))


async def _delete(store: ResponseStore | None, kind: Kind, object_id: str) -> None:
    await _found(store, kind, object_id, lambda database, owner: database.delete(owner, kind, object_id))


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def get_response(response_id: str, store: Store, stream: bool = False) -> Any:
    """A stored response."""
    if stream:
        raise RequestError("is for responses in the background, which there are none of: leave it out", param="stream")
    return JSONResponse(await _object(store, "response", response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, store: Store) -> Deleted:
    """Forgets a response; those that go on from it cannot be gone on from either."""
    await _delete(store, "response", response_id)
    return Deleted(id=response_id, object="response")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, store: Store, page: ItemPage) -> ItemList:
    """The items of a response's own request."""
    return await _list(store, "response", response_id, page)


@router.post("/v1/conversations")
async def create_conversation(body: ConversationRequest, parts: Parts, store: Store) -> ConversationObject:
    """Begins a conversation."""
    parts.ignored_fields.check(body)
    conversation = ConversationObject(metadata=body.metadata or {})
    items = stored_items(await with_stored_items(body.items or [], store, "items"))
    await _ask(
        store,
        lambda database, owner: database.put(owner, "conversation", conversation.id, conversation.model_dump(), items),
    )
    return conversation


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(conversation_id: str, store: Store) -> ConversationObject:
    """A conversation without its items."""
    return await _conversation(store, conversation_id)


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(
    conversation_id: str, body: ConversationUpdate, parts: Parts, store: Store
) -> ConversationObject:
    """Replaces a conversation's metadata."""
    parts.ignored_fields.check(body)
    changed = (await _conversation(store, conversation_id)).model_copy(update={"metadata": body.metadata or {}})
    values = changed.model_dump()
    await _ask(store, lambda database, owner: database.update(owner, "conversation", conversation_id, values))
    return changed


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, store: Store) -> Deleted:
    """Forgets a conversation and its items. Its responses, if they were stored, stay."""
    await _delete(store, "conversation", conversation_id)
    return Deleted(id=conversation_id, object="conversation.deleted")


@router.post("/v1/conversations/{conversation_id}/items")
async def create_items(conversation_id: str, body: NewItems, parts: Parts, store: Store) -> ItemList:
    """Appends items to a conversation."""
    parts.ignored_fields.check(body)
    items = stored_items(await with_stored_items(body.items, store, "items"))
    if not await _ask(store, lambda database, owner: database.add_items(owner, conversation_id, items)):
        raise not_found("conversation", conversation_id)
    return ItemList.of(items, has_more=False)


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(conversation_id: str, store: Store, page: ItemPage) -> ItemList:
    """The items of a conversation."""
    return await _list(store, "conversation", conversation_id, page)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(conversation_id: str, item_id: str, store: Store) -> dict[str, Any]:
    """One item."""
    item = await _ask(store, lambda database, owner: database.item(owner, conversation_id, item_id))
    if item is None:
        raise not_found("such item, or conversation", conversation_id)
    return item


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(conversation_id: str, item_id: str, store: Store) -> ConversationObject:
    """Removes one item; returns its conversation."""
    if not await _ask(store, lambda database, owner: database.delete_item(owner, conversation_id, item_id)):
        raise not_found("such item, or conversation", conversation_id)
    return await _conversation(store, conversation_id)
