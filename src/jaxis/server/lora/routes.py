"""Endpoints that load and unload adapters while the server runs, under vLLM's names."""

from __future__ import annotations

from typing import ClassVar

from fastapi import APIRouter, Depends
from fastapi.exceptions import HTTPException
from fastapi.responses import PlainTextResponse, Response

from jaxis.server.context import Parts
from jaxis.server.http.body import LenientModel, NotApplied
from jaxis.server.http.openapi import ADMIN_ERRORS, TEXT_ERRORS
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.lora.named_adapter import NamedAdapters
from jaxis.server.protocol import Protocol
from jaxis.server.routes.operations import check_admin


class LoadRequest(LenientModel):
    """An adapter to load.

    Attributes:
      lora_name: Name by which requests then ask for it.
      lora_path: Its folder, relative to the server's --lora-root.
      load_inplace: True if it may replace another adapter of this name.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        "lora_int_id": NotApplied(),
        "is_3d_lora_weight": NotApplied((False,), "experts are not supported"),
    }

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(LenientModel):
    """An adapter to unload."""

    not_applied: ClassVar[dict[str, NotApplied]] = {"lora_int_id": NotApplied()}

    lora_name: str


async def check_updates(parts: Parts) -> None:
    """Answers 403 unless the server was started with --lora-updates."""
    if not parts.config.lora_updates:
        raise HTTPException(
            403, "this server does not load adapters by request: start it with --lora-updates and --lora-root DIR"
        )


async def check_key(parts: Parts) -> None:
    """Answers 403 to API keys without `admin`, if the server has keys."""
    if parts.keys:
        await check_admin()


_RESPONSES = TEXT_ERRORS | ADMIN_ERRORS | {200: {"content": {"text/plain": {}}}}
router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_key), Depends(check_updates)])


@router.post("/v1/load_lora_adapter", responses=_RESPONSES, response_class=Response)
async def load(body: LoadRequest, parts: Parts) -> PlainTextResponse:
    """Loads an adapter while other requests run."""
    headers = parts.ignored_fields.check(body)
    await _adapters(parts).load(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.", headers=headers)


@router.post("/v1/unload_lora_adapter", responses=_RESPONSES, response_class=Response)
async def unload(body: UnloadRequest, parts: Parts) -> PlainTextResponse:
    """Unloads an adapter. Running requests continue to use it until they end."""
    headers = parts.ignored_fields.check(body)
    await _adapters(parts).unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", headers=headers)


def _adapters(parts: Parts) -> NamedAdapters:
    contexts = [entry.context for entry in parts.models.entries()]
    return contexts[0].model.adapters if len(contexts) == 1 and contexts[0] is not None else NamedAdapters()


PROTOCOL = Protocol(routers=[router])
