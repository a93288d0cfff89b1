"""The server's stored responses: found by their owners only, on a thread of their own."""

from __future__ import annotations

import asyncio
import functools
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from starlette.datastructures import State

from jaxis.errors import EngineError
from jaxis.server.config import ServerConfig
from jaxis.server.http.api_keys import current_api_key
from jaxis.server.openai.stored.database import Database

Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


class ResponseStore:
    """A `Database` that the event loop does not wait for. One thread does everything, in the order of the calls.

    Raises:
      ConfigError: The file cannot be used.
    """

    def __init__(self, folder: Path | None, max_bytes: int, ttl_seconds: float) -> None:
        self._database = Database(folder, max_bytes, ttl_seconds)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxis-responses")
        self._has_warned = False

    async def call(self, function: Callable[[Database], Result]) -> Result:
        """Returns a function's result for the database.

        Raises:
          EngineError: The database cannot be used, such as on a disk that is full.
        """
        work = functools.partial(function, self._database)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise EngineError(f"stored responses cannot be read or written: {error}") from None

    def submit(self, function: Callable[[Database], object]) -> None:
        """Has a function write to the database; calls from now on find what it writes. Errors go to the log."""
        self._thread.submit(self._write, function)

    def close(self) -> None:
        """Writes what is left."""
        self._thread.shutdown()
        self._database.close()

    def _write(self, function: Callable[[Database], object]) -> None:
        try:
            function(self._database)
        except sqlite3.Error as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("answers are not stored: %s", error)


def current_owner() -> str:
    """Returns the owner of the responses that the current request may see: its API key, or, without keys, everyone."""
    key = current_api_key.get()
    # Not the name: keys that are given as options share one, and another key may get the name of an old one.
    return "" if key is None else key.sha256


def attach_store(state: State, config: ServerConfig, stack: ExitStack) -> None:
    """Adds an application's store to its state. Raises ConfigError as `ResponseStore` does."""
    state.responses = None
    if config.response_ttl_seconds:
        store = ResponseStore(config.response_folder, config.response_store_bytes, config.response_ttl_seconds)
        state.responses = stack.enter_context(closing(store))


async def get_store(request: Request) -> ResponseStore | None:
    """Returns the application's store; None if it stores nothing."""
    return request.app.state.responses


Store = Annotated[ResponseStore | None, Depends(get_store)]
"""Type of a route's parameter for the stored responses."""
