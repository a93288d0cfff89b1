"""What changes the server's state, for holders of an admin key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException
from pydantic import BaseModel

from jaxis.server.endpoints.context import ServerContext, get_context
from jaxis.server.http.api_keys import current_api_key
from jaxis.server.protocol.errors import ADMIN_ERRORS


async def _check_admin() -> None:
    key = current_api_key.get()
    if key is None or not key.admin:
        raise HTTPException(
            403, "this needs a key with admin: true in the file of --api-key-file: make one with jaxis new-key --admin"
        )


router = APIRouter(dependencies=[Depends(_check_admin)])
Context = Annotated[ServerContext, Depends(get_context)]


class Success(BaseModel):
    """It was done."""

    success: bool = True


@router.post("/reset_prefix_cache", responses=ADMIN_ERRORS)
async def reset_prefix_cache(context: Context) -> Success:
    """Empties the prefix cache: requests from now on find nothing in it. Under vLLM's name."""
    context.engine.reset_prefix_cache()
    return Success()
