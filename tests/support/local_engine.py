"""Runs an engine in a thread of this process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from jaxis.engine.client.engine_change import EngineChange, UpdateWeights
from jaxis.engine.client.engine_client import EngineCallbacks, EngineClient, EngineInfo, EngineStats, Submission
from jaxis.engine.client.engine_thread import EngineThread
from jaxis.host.threads import run_in_daemon

if TYPE_CHECKING:
    import asyncio

    from jaxis.engine.setup import BuiltEngine

_logger = logging.getLogger(__name__)
Argument = TypeVar("Argument")


class LocalEngine(EngineClient):
    """An `EngineClient` of an engine in this process.

    Attributes:
      info, tokenizer, grammar_compiler: The engine's.

    Args:
      built: The engine; no other thread may use it from `connect` to `stop`.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self.info = EngineInfo.of(built)
        self.tokenizer = built.engine.tokenizer
        self.grammar_compiler = built.engine.grammar_compiler
        self._built = built

    def connect(self, loop: asyncio.AbstractEventLoop, callbacks: EngineCallbacks) -> None:
        """Starts the thread; see `EngineClient.connect`."""

        def in_loop(function: Callable[[Argument], None]) -> Callable[[Argument], None]:
            def call(argument: Argument) -> None:
                try:
                    loop.call_soon_threadsafe(function, argument)
                except RuntimeError:  # the loop is closed: no request is waiting any more
                    _logger.debug("the event loop ended before the engine")

            return call

        self._thread = EngineThread(self._built, in_loop(callbacks.deliver), in_loop(callbacks.fail))
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._thread.stats

    def add(self, submission: Submission) -> None:
        """See `EngineClient.add`."""
        self._thread.add(submission)

    def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        self._thread.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`."""
        self._thread.reset_prefix_cache()

    def load_adapter(self, call_id: int, source: str) -> None:
        """See `EngineClient.load_adapter`."""
        run_in_daemon(functools.partial(self._thread.load_adapter, call_id, source), "adapter")

    def change(self, call_id: int, change: EngineChange) -> None:
        """See `EngineClient.change`."""
        if isinstance(change, UpdateWeights):
            run_in_daemon(functools.partial(self._thread.change, call_id, change), "change")
        else:
            self._thread.change(call_id, change)

    def unload_adapter(self, adapter: bytes) -> None:
        """See `EngineClient.unload_adapter`."""
        self._thread.unload_adapter(adapter)

    def describe(self) -> None:
        """See `EngineClient.describe`."""
        self._thread.describe()

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request and the thread; returns whether it ended in time. The engine itself stays open."""
        return self._thread.stop(timeout_seconds)

    def is_making_progress(self, stall_seconds: float) -> bool:
        """See `EngineThread.is_making_progress`."""
        return self._thread.is_making_progress(stall_seconds)
