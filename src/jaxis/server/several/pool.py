"""The models of a server, loaded on demand: choice of the model for a request, and of the model that makes room."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.errors import DeadlineExceededError, EngineError, JaxisError, RequestError, UnavailableError
from jaxis.host.byte_size import human_bytes
from jaxis.host.machine import free_host_bytes, return_free_memory
from jaxis.server.context import Handler, ModelEntry, ServedModels, ServerContext, ServerParts, until_answered
from jaxis.server.generation.served_model import model_not_found
from jaxis.server.http.strict_json import StrictJSONRequest
from jaxis.server.one_model import model_context
from jaxis.server.several.loader_threads import LoaderThreads
from jaxis.server.several.model_settings import ModelSettings, PoolLimits, check_names, parse_duration
from jaxis.server.several.slot import ModelSlot, load_error
from jaxis.server.several.waiting import LoadWait, answer_while_loading, asked_model

StartEngine = Callable[[ModelSettings, MemoryBudget, Callable[[int], None]], AsyncEngine]
"""Starts a model's engine within a budget. It reports the bytes it will take to the function before it takes them."""
_SHUTTING_DOWN = "the server is shutting down: send the request to another one"
_logger = logging.getLogger(__name__)


class ModelPool(ServedModels):
    """Loads models when requests ask for them.

    Create it before the priority of the event loop's thread is lowered; see `LoaderThreads`.

    Raises:
      ConfigError: Two models have the same name.
    """

    def __init__(self, models: Sequence[ModelSettings], limits: PoolLimits, start_engine: StartEngine) -> None:
        check_names(models)
        self._slots = [ModelSlot(settings) for settings in models]
        self._limits = limits
        self._start_engine = start_engine
        self._threads = LoaderThreads()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def failure(self) -> EngineError | None:
        """None: a lost engine does not affect the others, and the next request loads its model again."""
        return None

    @property
    def request_bytes(self) -> int:
        return max(slot.request_bytes for slot in self._slots)

    def join(self, parts: ServerParts) -> None:
        self._parts = parts

    async def start(self) -> None:
        """Starts to load the pinned models."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        for slot in self._slots:
            if slot.settings.pinned:
                self._begin_load(slot)

    async def drain(self, deadline_seconds: float) -> None:
        """Stops taking requests; requests that wait for a model are refused."""
        self._close()
        await asyncio.gather(*(context.engine.drain(deadline_seconds) for context in self._contexts()))

    async def shutdown(self) -> None:
        """Ends the engines. An engine that is still loading ends with this process, or once it is loaded."""
        self._close()
        await asyncio.gather(*(context.engine.shutdown() for context in self._contexts()))
        self._threads.close()

    async def context_of(self, request: Request) -> ServerContext:
        """Waits for the model that a request asks for."""
        slot = self._slot(await asked_model(request))
        context = slot.context if slot.state == "loaded" else None
        if context is None or context.engine.failure is not None:
            context = await self._wait_for(slot, request)
        until_answered(request).callback(self._idle, slot)
        until_answered(request).enter_context(slot.used())
        return context

    async def answer(self, request: Request, handler: Handler) -> Response:
        """Returns the handler's answer. A stream that waits for its model sends signs of life."""
        return await answer_while_loading(request, handler, self._parts.config)

    def entries(self) -> Sequence[ModelEntry]:
        return [slot.entry() for slot in self._slots]

    def entry(self, name: str | None) -> ModelEntry:
        return self._slot(name).entry()

    def keep(self, name: str, keep_alive: str | float | None) -> None:
        """Sets the time that a model stays loaded after its last request."""
        slot = self._slot(name)
        slot.keep_seconds = slot.settings.idle_seconds if keep_alive is None else parse_duration(keep_alive)

    async def load(self, name: str | None) -> None:
        slot = self._slot(name)
        slot.forget_failure()
        with slot.waited_for():
            await self._loaded(slot)
        self._idle(slot)

    async def unload(self, name: str | None) -> bool:
        slot = self._slot(name)
        if slot.state == "loading":  # the requests that it is loaded for come first
            with slot.waited_for():
                await self._loaded(slot)
        if slot.state == "loaded":
            await self._unload(slot, "it was asked for")
        while slot.state == "unloading":
            await self._changed.wait()
        return True

    @property
    def is_making_progress(self) -> bool:
        """False only if no loaded model makes progress: a lost engine does not affect the others."""
        contexts = self._contexts()
        return not contexts or any(context.engine.is_making_progress for context in contexts)

    @property
    def is_accepting(self) -> bool:
        return not self._is_closed

    def _contexts(self) -> list[ServerContext]:
        return [slot.context for slot in self._slots if slot.context is not None]

    def _slot(self, name: str | None) -> ModelSlot:
        """Returns the model of a name. A name takes precedence over the patterns of all models."""
        if not name:
            if len(self._slots) == 1:
                return self._slots[0]
            raise RequestError(f"is missing: send one of {self._names()}", param="model")
        for has in (lambda names: names.is_named(name), lambda names: names.has(name)):
            for slot in self._slots:
                if has(slot.settings.names):
                    return slot
        raise model_not_found(name, [name for slot in self._slots for name in slot.settings.names.names])

    def _names(self) -> str:
        return ", ".join(slot.name for slot in self._slots)

    # Loading

    async def _wait_for(self, slot: ModelSlot, request: Request) -> ServerContext:
        if isinstance(request, StrictJSONRequest):
            await request.check_body()  # a request that will be refused loads nothing
        timeout = self._parts.config.request_timeout_seconds
        with LoadWait.of(request, slot.name), slot.waited_for():
            try:
                async with asyncio.timeout(timeout):
                    return await self._loaded(slot)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"the model {slot.name!r} is still being loaded, and a request may take {timeout:g} s here: "
                    "the load goes on, send the request again in a while"
                ) from None

    async def _loaded(self, slot: ModelSlot) -> ServerContext:
        """Returns the model's context once it is loaded. All waiting requests share one load."""
        while True:
            if self._is_closed:
                raise UnavailableError(_SHUTTING_DOWN)
            if slot.context is not None and slot.state == "loaded":
                if slot.context.engine.failure is None:
                    return slot.context
                await self._unload(slot, "its engine has failed")
            elif slot.state == "unloading":
                await self._changed.wait()
            elif slot.outcome is not None:
                await asyncio.shield(slot.outcome)
            elif (failure := slot.recent_failure) is not None:
                raise failure
            else:
                await asyncio.shield(self._begin_load(slot))

    def _begin_load(self, slot: ModelSlot) -> asyncio.Future[None]:
        outcome = slot.begin_load()
        self._run(self._load(slot))
        return outcome

    async def _load(self, slot: ModelSlot) -> None:
        start, config = time.monotonic(), slot.settings.config
        budget = self._limits.budget(len(self._slots))
        try:
            await self._make_room(slot, 0)
            start_engine = functools.partial(self._start_engine, slot.settings, budget)
            engine = await self._threads.run(lambda: start_engine(functools.partial(self._admit, slot)))
            try:
                context = await self._threads.run(lambda: model_context(self._parts, engine, config, slot.metrics))
                if self._is_closed:
                    raise UnavailableError(_SHUTTING_DOWN)
            except BaseException:
                await engine.shutdown()
                raise
            engine.start()
        except Exception as error:
            if not isinstance(error, JaxisError):
                _logger.exception("the model %r cannot be loaded", slot.name)
            failure = load_error(slot.name, error)
            _logger.error("%s", failure)
            slot.has_failed(failure)
        else:
            slot.has_loaded(context)
            _logger.info("the model %r is loaded, after %.1f s", slot.name, time.monotonic() - start)
        self._notify()
        self._idle(slot)

    # Memory

    def _admit(self, slot: ModelSlot, num_bytes: int) -> None:
        """Reserves memory; called in the thread that starts an engine."""
        asyncio.run_coroutine_threadsafe(self._make_room(slot, num_bytes), self._loop).result()

    async def _make_room(self, slot: ModelSlot, num_bytes: int) -> None:
        """Unloads idle models until another has room, the least recently used first. Waits for models in use.

        Raises:
          UnavailableError: No room can be made.
        """
        others = [other for other in self._slots if other is not slot]
        while not self._has_room(others, num_bytes):
            if not self._has_room([other for other in others if other.settings.pinned], num_bytes, is_free=True):
                raise self._no_room(slot, num_bytes)
            admitted = [other for other in others if other.is_admitted and not other.settings.pinned]
            if not admitted:
                raise self._no_room(slot, num_bytes)
            if idle := [other for other in admitted if other.is_idle]:
                await self._unload(min(idle, key=lambda other: other.last_used), f"{slot.name!r} needs room")
            else:
                await self._changed.wait()
            if self._is_closed:
                raise UnavailableError(_SHUTTING_DOWN)
        slot.is_admitted, slot.reserved_bytes = True, num_bytes

    def _has_room(self, others: Sequence[ModelSlot], num_bytes: int, *, is_free: bool = False) -> bool:
        """Returns whether there is room beside others. `is_free` ignores the memory of other programs."""
        loaded = [other for other in others if other.is_admitted]
        if len(loaded) >= (self._limits.most_loaded or math.inf):
            return False
        if sum(other.reserved_bytes for other in loaded) + num_bytes > self._limits.budget_bytes:
            return False
        return is_free or num_bytes <= free_host_bytes()

    def _no_room(self, slot: ModelSlot, num_bytes: int) -> UnavailableError:
        if not num_bytes:
            return UnavailableError("every model that may be loaded at once is pinned: allow more, or pin fewer")
        pinned = sum(other.reserved_bytes for other in self._slots if other is not slot and other.settings.pinned)
        has = min(self._limits.budget_bytes - pinned, free_host_bytes())
        beside = " beside those that are pinned" if pinned else ""
        return UnavailableError(
            f"it takes {human_bytes(num_bytes)} of memory, and {human_bytes(max(0, has))} can be used{beside}: give it "
            "a smaller max_model_len or kv_cache_memory, or quantization: int8"
        )

    # Unloading

    def _idle(self, slot: ModelSlot) -> None:
        """Schedules the unloading of an idle model; called when a request has ended."""
        self._notify()
        if slot.is_idle and not slot.settings.pinned and math.isfinite(slot.keep_seconds):
            self._loop.call_later(slot.keep_seconds, self._expire, slot, slot.last_used)

    def _expire(self, slot: ModelSlot, last_used: float) -> None:
        if slot.is_idle and slot.last_used == last_used and math.isfinite(slot.keep_seconds):
            self._run(self._unload(slot, "nobody has asked for it in a while"))

    async def _unload(self, slot: ModelSlot, why: str) -> None:
        """Unloads a model once its requests have ended. New requests wait for the next load."""
        context = slot.context
        assert context is not None
        slot.state = "unloading"
        self._notify()
        while slot.num_running:
            await self._changed.wait()
        await context.engine.shutdown()
        slot.has_unloaded()
        _logger.info("the model %r is unloaded: %s", slot.name, why)
        self._notify()
        del context
        await asyncio.to_thread(return_free_memory)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        self._is_closed = True
        for slot in self._slots:
            if slot.outcome is not None and not slot.outcome.done():
                slot.outcome.set_exception(UnavailableError(_SHUTTING_DOWN))
                slot.outcome.exception()
        self._notify()
