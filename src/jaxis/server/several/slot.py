"""State of one of several models: loaded or not, its users, and its known properties."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from jaxis.errors import EngineError, JaxisError
from jaxis.server.context import KnownModel, ModelEntry, ModelState, ServerContext
from jaxis.server.generation.model_info import ServedModelInfo
from jaxis.server.observability.metrics import ModelMetrics
from jaxis.server.several.model_settings import ModelSettings

# Time that requests get the error of a failed load before the load is tried again.
RETRY_SECONDS = 10.0


class ModelSlot:
    """A model, loaded or not. It belongs to the event loop.

    Attributes:
      state: Its state, from unloaded to loaded and back.
      context: Its context for requests; None while it is not loaded.
      outcome: Future that ends with the current load; None if it is not loading.
      is_admitted: True if it counts as one of the loaded models.
      reserved_bytes: Memory that its engine has, or will take.
      num_running, num_waiting: Requests that use it, and requests that wait until it is loaded.
      last_used: Time of the last request's end, in `time.monotonic` seconds.
      keep_seconds: Time that it stays loaded after `last_used`.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.state: ModelState = "unloaded"
        self.context: ServerContext | None = None
        self.metrics: ModelMetrics | None = None
        self.outcome: asyncio.Future[None] | None = None
        self.is_admitted = False
        self.reserved_bytes = 0
        self.num_running = self.num_waiting = 0
        self.last_used = time.monotonic()
        self.keep_seconds = settings.idle_seconds
        self._failure: tuple[float, JaxisError] | None = None
        self._info: ServedModelInfo | None = None
        self._facts: KnownModel | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def request_bytes(self) -> int:
        """Largest request body, as in `KnownModel`; 0 if the model was never loaded."""
        return 0 if self._facts is None else self._facts.request_bytes

    @property
    def is_idle(self) -> bool:
        """True if it is loaded, and no request uses it or waits for it."""
        return self.state == "loaded" and not self.num_running and not self.num_waiting

    @property
    def recent_failure(self) -> JaxisError | None:
        """Error of its last load, for `RETRY_SECONDS`; None otherwise."""
        if self._failure is None or time.monotonic() - self._failure[0] > RETRY_SECONDS:
            return None
        return self._failure[1]

    def forget_failure(self) -> None:
        self._failure = None

    def begin_load(self) -> asyncio.Future[None]:
        """Marks the start of a load, and returns a future that ends with it."""
        self.state = "loading"
        self._failure = None
        self.outcome = asyncio.get_running_loop().create_future()
        return self.outcome

    def has_loaded(self, context: ServerContext) -> None:
        """Marks the load as successful."""
        self.state, self.context, self.metrics = "loaded", context, context.metrics
        self.last_used = time.monotonic()
        self._info, self._facts = context.model_info, KnownModel.of(context)
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(None)
        self.outcome = None

    def has_failed(self, error: JaxisError) -> None:
        """Marks the load as failed."""
        self._failure = time.monotonic(), error
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # marks it as retrieved, since perhaps no request waits for it
        self.outcome = None
        self.has_unloaded()

    def has_unloaded(self) -> None:
        """Marks the model as unloaded."""
        self.state, self.context = "unloaded", None
        self.is_admitted, self.reserved_bytes = False, 0
        self.keep_seconds = self.settings.idle_seconds
        if self.metrics is not None:
            self.metrics.watch_none()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Counts a waiting request during the block."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    @contextmanager
    def used(self) -> Iterator[None]:
        """Counts a request that uses the model during the block."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self.last_used = time.monotonic()

    def entry(self) -> ModelEntry:
        """Returns its entry in the server's lists."""
        if self._info is None:
            self._info = ServedModelInfo.of_files(_path(self.settings.engine_arguments))
        expires = None
        if self.state == "loaded" and not self.settings.pinned and math.isfinite(self.keep_seconds):
            idle_seconds = time.monotonic() - self.last_used if self.is_idle else 0.0
            expires = datetime.now(UTC) + timedelta(seconds=max(0.0, self.keep_seconds - idle_seconds))
        return ModelEntry(
            names=self.settings.names,
            state=self.state,
            info=self._info,
            facts=self._facts,
            context=self.context,
            expires=expires,
        )


def load_error(name: str, error: Exception) -> JaxisError:
    """Returns the error of a request whose model cannot be loaded. It is the server's fault, not the request's."""
    kind = type(error) if isinstance(error, EngineError) else EngineError
    reason = str(error).partition("\n")[0] or type(error).__name__
    return kind(f"the model {name!r} cannot be loaded: {reason}")


def _path(arguments: Any) -> str:
    return str(arguments.get("model") or "")
