"""List of a server's unfinished requests, for operators."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from jaxis.errors import UnavailableError
from jaxis.server.context import Parts
from jaxis.server.http.openapi import ADMIN_ERRORS
from jaxis.server.protocol import Protocol
from jaxis.server.routes.operations import check_admin

router = APIRouter()


class RequestInfo(BaseModel):
    """An unfinished request, without any of its prompt and answer.

    Attributes:
      model: First name of its model.
      client: Name of its API key, or its network address.
      state: "preparing" (a grammar compiles, or blocks are fetched), "waiting", "running" or "preempted".
      computed_tokens: Tokens of prompt and answers whose keys and values are computed.
      arrived: Time of arrival in Unix seconds.
      waiting_seconds: Time from arrival to its first step, or to now.
      running_seconds: Time since its first step.
    """

    id: str
    model: str
    client: str | None
    priority: int
    state: Literal["preparing", "waiting", "running", "preempted"]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    arrived: float
    waiting_seconds: float
    running_seconds: float


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RequestInfo]


@router.get("/v1/requests", responses=ADMIN_ERRORS, dependencies=[Depends(check_admin)])
async def list_requests(parts: Parts) -> RequestList:
    """Lists the unfinished requests of all loaded models, in order of arrival."""
    found = []
    for entry in parts.models.entries():
        if entry.context is None:
            continue
        try:
            described = await entry.context.engine.describe()
        except TimeoutError:
            raise UnavailableError("the engine is in a long step: ask again in a while") from None
        now, unix = time.monotonic(), time.time()
        for request, state in described:
            started = None if state is None else state.first_scheduled_time
            info = RequestInfo(
                id=request.request_id,
                model=entry.context.model.name,
                client=parts.keys.shown(request.client),
                priority=request.priority,
                state="preparing" if state is None else state.status,
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=0 if state is None else state.num_cached_tokens,
                computed_tokens=0 if state is None else state.num_computed_tokens,
                generated_tokens=0 if state is None else state.num_generated_tokens,
                arrived=unix - (now - request.arrival),
                waiting_seconds=max(0.0, (now if started is None else started) - request.arrival),
                running_seconds=0.0 if started is None else max(0.0, now - started),
            )
            found.append(info)
    return RequestList(data=sorted(found, key=lambda each: each.arrived))


PROTOCOL = Protocol(routers=[router])
