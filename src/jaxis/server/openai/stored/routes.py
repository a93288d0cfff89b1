"""/v1/responses/{id}: stored responses, for their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse

from jaxis.errors import RequestError
from jaxis.server.http.openapi import TEXT_ERRORS, error_responses
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.openai.response_schema import ResponseObject
from jaxis.server.openai.stored.database import Database, Page
from jaxis.server.openai.stored.schema import Deleted, ItemList
from jaxis.server.openai.stored.store import ResponseStore, Store, current_owner
from jaxis.server.openai.stored.turn import NOTHING_STORED, not_found

Result = TypeVar("Result")
router = APIRouter(route_class=StrictJSONRoute, responses={**TEXT_ERRORS, **error_responses(500)})


def _page(
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Page:
    return Page(after, limit, order == "desc")


ItemPage = Annotated[Page, Depends(_page)]


async def _found(
    store: ResponseStore | None, name: str, response_id: str, function: Callable[[Database, str], Result | None]
) -> Result:
    """Returns a function's result for the current owner's responses; raises an error if it is None or False, since
    there is no such response.
    """
    if store is None:
        raise RequestError(f"this route has nothing to work on: {NOTHING_STORED}")
    owner = current_owner()
    if not (result := await store.call(lambda database: function(database, owner))):
        raise not_found(name, response_id)
    return result


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def get_response(response_id: str, store: Store, stream: bool = False) -> Any:
    """A stored response."""
    if stream:
        raise RequestError("is for responses in the background, which there are none of: leave it out", param="stream")
    found = await _found(store, "response", response_id, lambda database, owner: database.get(owner, response_id))
    return JSONResponse(found)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, store: Store) -> Deleted:
    """Forgets a response; those that go on from it cannot be gone on from either."""
    await _found(store, "response", response_id, lambda database, owner: database.delete(owner, response_id))
    return Deleted(id=response_id)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, store: Store, page: ItemPage) -> ItemList:
    """The items of a response's own request."""
    name = "response" if page.after is None else "response, or item in it,"
    items, has_more = await _found(
        store, name, response_id, lambda database, owner: database.page(owner, response_id, page)
    )
    return ItemList.of(items, has_more=has_more)
