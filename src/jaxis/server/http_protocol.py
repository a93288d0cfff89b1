"""Connections: uvicorn's, without those that a client holds and does nothing with.

uvicorn waits without limit for a request's first line and headers, for the rest of a body that was answered before it
was complete, and for a client to read the end of an answer. Each costs a file descriptor, the last one memory too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_CHECKS_PER_TIMEOUT = 4


class TimedH11Protocol(H11Protocol):
    """Ends a connection on which no request is in progress and nothing gets on.

    Args:
      idle_timeout_seconds: From the connection, or the end of an answer, to the next request with all its headers;
        begun anew whenever the client has read some of an answer that still waits to be sent.
      **uvicorn: uvicorn's own arguments.
    """

    def __init__(self, *, idle_timeout_seconds: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._idle_timeout_seconds = idle_timeout_seconds
        self._check_handle: asyncio.TimerHandle | None = None
        self._seen_cycle: Any = None
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """asyncio's call."""
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's call."""
        if self._check_handle is not None:
            self._check_handle.cancel()
        super().connection_lost(exc)

    def _check_later(self) -> None:
        self._check_handle = self.loop.call_later(self._idle_timeout_seconds / _CHECKS_PER_TIMEOUT, self._check)

    def _check(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()
        unsent_bytes = self.transport.get_write_buffer_size()
        if answering or self.cycle is not self._seen_cycle or unsent_bytes < self._unsent_bytes:
            self._idle_since = time.monotonic()
        self._seen_cycle, self._unsent_bytes = self.cycle, unsent_bytes
        if time.monotonic() - self._idle_since >= self._idle_timeout_seconds:
            self.transport.abort()
        else:
            self._check_later()
