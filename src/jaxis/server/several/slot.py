"""One model of several: whether it is loaded, who uses it, and what is known of it."""

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

# How long requests get the error of a load that has failed, before it is tried again.
RETRY_SECONDS = 10.0


class ModelSlot:
    """A model, loaded or not. Belongs to the event loop.

    Attributes:
      settings: What it is.
      state: Where it is between unloaded and loaded.
      context: It as requests see it; None while it is not loaded.
      metrics: Its metrics; None before the first load.
      outcome: Ends with the load that runs; None while none does.
      is_admitted: It counts as one of the models that are loaded.
      reserved_bytes: Memory that its engine has, or will take.
      num_running, num_waiting: Requests that use it, and those that wait until it is loaded.
      last_used: When a request last did, as `time.monotonic` seconds.
      keep_seconds: How long it stays loaded from then on.
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
        """The first of its names."""
        return self.settings.name

    @property
    def request_bytes(self) -> int:
        """See `KnownModel`; 0 if it was never loaded."""
        return 0 if self._facts is None else self._facts.request_bytes

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and no request uses it or waits for it."""
        return self.state == "loaded" and not self.num_running and not self.num_waiting

    @property
    def recent_failure(self) -> JaxisError | None:
        """Why it could not be loaded, for a while."""
        if self._failure is None or time.monotonic() - self._failure[0] > RETRY_SECONDS:
            return None
        return self._failure[1]

    def forget_failure(self) -> None:
        """Lets the next request try again."""
        self._failure = None

    def begin_load(self) -> asyncio.Future[None]:
        """Begins to load; the future ends with it."""
        self.state = "loading"
        self._failure = None
        self.outcome = asyncio.get_running_loop().create_future()
        return self.outcome

    def has_loaded(self, context: ServerContext) -> None:
        """The load has ended well."""
        self.state, self.context, self.metrics = "loaded", context, context.metrics
        self.last_used = time.monotonic()
        self._info, self._facts = context.model_info, KnownModel.of(context)
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(None)
        self.outcome = None

    def has_failed(self, error: JaxisError) -> None:
        """The load has failed."""
        self._failure = time.monotonic(), error
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # there may be nobody to see it
        self.outcome = None
        self.has_unloaded()

    def has_unloaded(self) -> None:
        """Nothing of it is in memory."""
        self.state, self.context = "unloaded", None
        self.is_admitted, self.reserved_bytes = False, 0
        self.keep_seconds = self.settings.idle_seconds
        if self.metrics is not None:
            self.metrics.watch_none()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """A request waits for it while the block runs."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    @contextmanager
    def used(self) -> Iterator[None]:
        """A request uses it while the block runs."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self.last_used = time.monotonic()

    def entry(self) -> ModelEntry:
        """It in the lists of the server."""
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
    """The error of a request whose model cannot be loaded: the server's fault, not the request's."""
    kind = type(error) if isinstance(error, EngineError) else EngineError
    reason = str(error).partition("\n")[0] or type(error).__name__
    return kind(f"the model {name!r} cannot be loaded: {reason}")


def _path(arguments: Any) -> str:
    return str(arguments.get("model") or "")
