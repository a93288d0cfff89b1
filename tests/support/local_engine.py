"""Runs an engine in a thread of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from jaxis.engine.client.async_engine import EngineCallbacks, EngineClient
from jaxis.engine.client.engine_client import EngineInfo, EngineStats
from jaxis.engine.client.engine_thread import EngineThread
from jaxis.engine.client.generation_core import GenerationCore
from jaxis.engine.client.wire import Command
from jaxis.pooling.pooling_core import PoolingCore

if TYPE_CHECKING:
    import asyncio

    from jaxis.engine.client.engine_core import EngineCore
    from jaxis.engine.setup import BuiltEngine
    from jaxis.pooling.embedder import Embedder

_logger = logging.getLogger(__name__)
Argument = TypeVar("Argument")


class LocalEngine(EngineClient):
    """An `EngineClient` of an engine in this process.

    Attributes:
      info, tokenizer: The engine's.

    Args:
      built: The engine; no other thread may use it from `connect` to `stop`.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self.info, self.tokenizer = EngineInfo.of(built), built.engine.tokenizer
        self._built = built

    def _core(self) -> EngineCore:
        return GenerationCore(self._built)

    def connect(self, loop: asyncio.AbstractEventLoop, callbacks: EngineCallbacks) -> None:
        """Starts the thread; see `EngineClient.connect`."""

        def in_loop(function: Callable[[Argument], None]) -> Callable[[Argument], None]:
            def call(argument: Argument) -> None:
                try:
                    loop.call_soon_threadsafe(function, argument)
                except RuntimeError:  # the loop is closed: no request is waiting any more
                    _logger.debug("the event loop ended before the engine")

            return call

        self._thread = EngineThread(self._core(), in_loop(callbacks.deliver), in_loop(callbacks.fail))
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._thread.stats

    def send(self, command: Command) -> None:
        """Hands the thread a command."""
        self._thread.take(command)

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request and the thread; returns whether it ended in time. The engine itself stays open."""
        return self._thread.stop(timeout_seconds)

    def is_making_progress(self, stall_seconds: float) -> bool:
        """True while steps end in time."""
        return self._thread.is_making_progress(stall_seconds)


class LocalPooling(LocalEngine):
    """An `EngineClient` of an `Embedder` in this process, which no other thread may use from `connect` to `stop`."""

    def __init__(self, embedder: Embedder) -> None:
        self.info, self.tokenizer, self._model = embedder.info, embedder.reader.tokenizer, embedder.model

    def _core(self) -> EngineCore:
        return PoolingCore(self._model)
