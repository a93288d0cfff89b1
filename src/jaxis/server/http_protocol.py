"""uvicorn's HTTP protocol on a parser in C, with the limits on headers that it lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 32 * 1024
HEADER_TIMEOUT_SECONDS = 30.0
# Written past the application, which has not got the request yet.
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class LimitedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose headers do not end: after `MAX_HEADER_BYTES`, or `HEADER_TIMEOUT_SECONDS`.

    The parser hands over whole headers only, so the application cannot refuse one that never ends. A body is the
    application's to limit.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The event loop's call."""
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The event loop's call."""
        self._end_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The event loop's call."""
        super().data_received(data)
        if self._header_timer is None:
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """The parser's call, at the first byte of a request."""
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        """The parser's call."""
        self._end_headers()
        super().on_headers_complete()

    def _await_headers(self) -> None:
        self._end_headers()
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.transport.close)

    def _end_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
