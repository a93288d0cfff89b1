"""vLLM's endpoints for reinforcement learning: pause, sleep, and new weights from a folder of this host."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.datastructures import State

from jaxis.engine.client.async_llm_engine import AsyncLLMEngine, PauseMode
from jaxis.errors import CheckpointError, ConfigError, EngineError, RequestError
from jaxis.server.context import Parts, ServerParts
from jaxis.server.http.body import LenientModel, NotApplied
from jaxis.server.http.openapi import ADMIN_ERRORS, TEXT_ERRORS
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.protocol import Protocol
from jaxis.server.routes.operations import check_admin
from jaxis.server.weights.served_weights import ServedWeights

_BACKEND = "file"
# vLLM's endpoints that are not needed here, with advice.
_REFUSED = {
    "/start_draft_weight_update": "drafts come with the model: give a folder that has both",
    "/update_weight_version": "a version belongs to an update: give it to /update_weights or /finish_weight_update",
    "/weight_checker": "weights are packed for this machine: compare the answers to a seeded request",
    "/abort_requests": "pause with mode=abort, and resume",
}


class InitRequest(LenientModel):
    """Setup of the transfer of weights.

    Attributes:
      init_info: Parameters of the transfer; without an address, since weights come by folders.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {}

    init_info: dict[str, Any]


class UpdateInfo(LenientModel):
    """Source of new weights.

    Attributes:
      path: Folder with safetensors files, in the server's --weights-root.
      version: Version in the outputs; None adds one to the number of updates.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {}

    path: str | None = None
    version: str | int | None = None


class UpdateRequest(LenientModel):
    """New weights."""

    not_applied: ClassVar[dict[str, NotApplied]] = {}

    update_info: UpdateInfo


class FinishRequest(LenientModel):
    """The end of an update.

    Attributes:
      weight_version: Version in the outputs, if /update_weights named none.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {}

    weight_version: str | None = None


class DoneMessage(BaseModel):
    """Message that a request was carried out."""

    message: str


class EngineStatus(BaseModel):
    """State of the engine after a request."""

    status: str


def _attach(state: State, *_: object) -> None:
    state.weights = None


async def _engine(parts: Parts) -> AsyncLLMEngine:
    """Returns the engine; raises RequestError unless the server has one model that generates."""
    context = parts.models.only_context
    if context is not None and "completion" in context.engine.info.capabilities:
        return context.generator
    raise RequestError("this is for a server of one model that generates text: start it with one model")


Engine = Annotated[AsyncLLMEngine, Depends(_engine)]


async def _weights(request: Request, engine: Engine) -> ServedWeights:
    state = request.app.state
    state.weights = state.weights or ServedWeights(engine)
    return state.weights


Weights = Annotated[ServedWeights, Depends(_weights)]
_RESPONSES = TEXT_ERRORS | ADMIN_ERRORS
router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_admin)])


async def _finish(change: Awaitable[None], parts: ServerParts, param: str | None = None) -> None:
    try:
        await change
    except (CheckpointError, ConfigError, EngineError) as error:
        raise RequestError(f": {error}" if param else str(error), param=param) from None
    parts.models.renew_fingerprint()


@router.post("/pause", responses=_RESPONSES)
async def pause(
    engine: Engine,
    parts: Parts,
    mode: PauseMode = "abort",
    wait_for_inflight_requests: bool = False,
    clear_cache: bool = True,
) -> EngineStatus:
    """Stops all requests until /resume. New ones wait."""
    mode = "wait" if wait_for_inflight_requests else mode
    await _finish(engine.pause(mode), parts)
    if clear_cache and mode != "keep":
        engine.reset_prefix_cache()
    return EngineStatus(status="paused")


@router.post("/resume", responses=_RESPONSES)
async def resume(engine: Engine, parts: Parts) -> EngineStatus:
    """Lets requests run again."""
    await _finish(engine.resume(), parts)
    return EngineStatus(status="resumed")


@router.get("/is_paused", responses=_RESPONSES)
async def is_paused(engine: Engine) -> dict[str, bool]:
    """Returns whether the engine is paused."""
    return {"is_paused": engine.is_paused}


@router.post("/sleep", responses=_RESPONSES)
async def sleep(
    engine: Engine,
    weights: Weights,
    parts: Parts,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: PauseMode = "abort",
) -> EngineStatus:
    """Frees the memory of the KV cache, and the device memory of the weights, until /wake_up."""
    was_paused = engine.is_paused
    await _finish(engine.pause(mode), parts)
    try:
        await _finish(weights.sleep(level), parts)
    except RequestError:
        if not was_paused:
            await _finish(engine.resume(), parts)
        raise
    return EngineStatus(status="asleep")


@router.post("/wake_up", responses=_RESPONSES)
async def wake_up(
    engine: Engine,
    weights: Weights,
    parts: Parts,
    tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
) -> EngineStatus:
    """Wakes the engine, or a part of it. Requests run again once everything is awake."""
    await _finish(weights.wake_up(tags), parts)
    if not weights.is_asleep:
        await _finish(engine.resume(), parts)
    return EngineStatus(status="asleep" if weights.is_asleep else "awake")


@router.get("/is_sleeping", responses=_RESPONSES)
async def is_sleeping(weights: Weights) -> dict[str, bool]:
    """Returns whether the engine sleeps."""
    return {"is_sleeping": weights.is_asleep}


@router.get("/get_world_size", responses=_RESPONSES)
async def get_world_size(engine: Engine, include_dp: bool = True) -> dict[str, int]:
    """Returns the number of devices that run the model; without `include_dp`, of one data rank."""
    return {"world_size": engine.info.num_devices // (1 if include_dp else engine.info.num_ranks)}


@router.get("/server_info", responses=_RESPONSES)
async def server_info(engine: Engine) -> dict[str, Any]:
    """Returns the parts of vLLM's configuration that TRL reads: transfer of weights, and mode of log-probabilities."""
    model = {"logprobs_mode": engine.info.logprobs_mode, "max_model_len": engine.info.max_model_len}
    return {"vllm_config": {"weight_transfer_config": {"backend": _BACKEND}, "model_config": model}}


@router.post("/init_weight_transfer_engine", responses=_RESPONSES)
async def init_weight_transfer_engine(body: InitRequest, parts: Parts) -> DoneMessage:
    """Accepts folders as the way of transfer, which needs no setup, and refuses other ways."""
    if (backend := body.init_info.get("backend", _BACKEND)) != _BACKEND or "master_address" in body.init_info:
        name = "nccl" if backend == _BACKEND else str(backend)[:32]
        raise RequestError(
            f"weights do not come by {name} here: write them into a folder, and send its path to /update_weights",
            param="init_info",
        )
    _root(parts)
    return DoneMessage(message="Weight transfer initialized")


@router.post("/start_weight_update", responses=_RESPONSES)
async def start_weight_update(weights: Weights) -> DoneMessage:
    """Starts an update, so that new weights take effect at /finish_weight_update instead of /update_weights."""
    weights.is_update_started, weights.pending = True, None
    return DoneMessage(message="Weight update started")


@router.post("/update_weights", responses=_RESPONSES)
async def update_weights(body: UpdateRequest, weights: Weights, parts: Parts) -> DoneMessage:
    """Loads the weights of a folder into the model. Requests that are not paused continue with them."""
    if body.update_info.path is None:
        raise RequestError("must name a folder as path: weights come no other way here", param="update_info")
    folder, version = str(folder_within(_root(parts), body.update_info.path)), body.update_info.version
    if weights.is_update_started:
        weights.pending = folder, version
        return DoneMessage(message="Weights will be updated at /finish_weight_update")
    await _finish(weights.update(folder, version), parts, "update_info")
    return DoneMessage(message="Weights updated")


@router.post("/finish_weight_update", responses=_RESPONSES)
async def finish_weight_update(body: FinishRequest, weights: Weights, parts: Parts) -> DoneMessage:
    """Loads the weights that were named since /start_weight_update."""
    pending, weights.is_update_started, weights.pending = weights.pending, False, None
    if pending is None:
        raise RequestError("no weights were named: send /start_weight_update, /update_weights, and this")
    folder, version = pending
    version = version if body.weight_version is None else body.weight_version
    await _finish(weights.update(folder, version), parts, "update_info")
    return DoneMessage(message="Weight update finished")


@router.get("/weight_info", responses=_RESPONSES)
async def weight_info(weights: Weights) -> dict[str, str | int]:
    """Returns the version of the weights."""
    return {"weight_version": weights.version}


def _refuse(path: str, reason: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise RequestError(f"{path} is not supported: {reason}")

    refuse.__doc__ = f"Not supported: {reason}."
    return refuse


for _path, _reason in _REFUSED.items():
    router.add_api_route(_path, _refuse(_path, _reason), methods=["POST"], responses=_RESPONSES)


def _root(parts: ServerParts) -> Path:
    if parts.config.weights_root is None:
        raise RequestError("this server reads no other weights: start it with --weights-root DIR")
    return parts.config.weights_root


def folder_within(root: Path, path: str) -> Path:
    """Returns the folder of a path relative to the root, with links resolved.

    Raises:
      RequestError: The path is no folder, or the folder or a file in it is outside of the root.
    """
    if "\0" in path:
        raise RequestError("is no path", param="update_info.path")
    root = Path(os.path.realpath(root))
    folder = Path(os.path.realpath(root / path))
    if not folder.is_relative_to(root):
        raise RequestError("is outside of the folder that weights are loaded from", param="update_info.path")
    if not folder.is_dir():
        raise RequestError("is no folder of --weights-root", param="update_info.path")
    for file in folder.iterdir():
        if not Path(os.path.realpath(file)).is_relative_to(root):
            raise RequestError(f"has {file.name}, which is outside of --weights-root", param="update_info.path")
    return folder


PROTOCOL = Protocol(routers=[router], attach=_attach)
