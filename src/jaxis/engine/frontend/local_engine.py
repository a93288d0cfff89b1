"""An engine in this process, in a thread of its own, as `AsyncLLMEngine` wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxis.engine.frontend.engine_thread import EngineStats, EngineThread, Outbox, Submission

if TYPE_CHECKING:
    import asyncio

    from jaxis.engine.setup import BuiltEngine

_logger = logging.getLogger(__name__)


class LocalEngine:
    """Has what `EngineProcess` has, under the same names.

    Args:
      built: The engine; nobody else may use it from `connect` to `stop`.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self.default_sampling_params = built.default_sampling_params
        self.tokenizer = built.engine.tokenizer
        self.grammar_compiler = built.engine.grammar_compiler
        self.max_model_len = built.engine.max_model_len
        self.max_num_seqs = built.engine.vllm_config.scheduler_config.max_num_seqs
        self.model_type = built.engine.vllm_config.model_config.hf_config.get("model_type")
        self._engine = built.engine

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        blocks = self._engine.scheduler.block_manager
        return blocks.num_blocks * blocks.block_size

    def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Outbox], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Starts the thread; see `EngineProcess.connect`."""

        def in_loop(function: Callable[..., None]) -> Callable[..., None]:
            def call(argument: object) -> None:
                try:
                    loop.call_soon_threadsafe(function, argument)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    _logger.debug("the event loop ended before the engine")

            return call

        self._thread = EngineThread(self._engine, in_loop(deliver), in_loop(fail))
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._thread.stats

    def add(self, submission: Submission) -> None:
        """Queues a request; its stream gets an error if it cannot be honoured."""
        self._thread.add(submission)

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished; its stream gets its last output, with finish_reason "abort"."""
        self._thread.abort(request_id)

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request and the thread; returns whether it has ended in time. The engine is left as it was."""
        return self._thread.stop(timeout_seconds)

    def is_making_progress(self, stall_seconds: float) -> bool:
        """See `EngineThread.is_making_progress`."""
        return self._thread.is_making_progress(stall_seconds)
