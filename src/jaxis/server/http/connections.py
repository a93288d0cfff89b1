"""HTTP connections: uvicorn's httptools protocol, with limits on headers and on idle connections.

uvicorn waits indefinitely for a request's first line and headers, however long they get, for the rest of a body that
was answered before it was complete, and for a client to read the end of an answer. Each wait holds a file descriptor,
and most hold memory, too.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxis.server.http.errors import ApiError
from jaxis.server.http.hosts import TARGET_HOST

MAX_HEADER_BYTES = 32 * 1024
_CHECKS_PER_TIMEOUT = 4
_HEADERS_TOO_LARGE = ApiError(
    431, f"the address and headers are larger than the {MAX_HEADER_BYTES} bytes that this server takes"
)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose headers are too large, or that is idle without a request in progress.

    The parser delivers only complete headers, so the application cannot refuse one that never ends.

    Args:
      idle_timeout_seconds: Time from the connection, or the end of an answer, to the next request with all its headers.
        It starts again whenever the client has read some of an answer that still waits to be sent.
      **uvicorn: Arguments of uvicorn.
    """

    def __init__(self, *, idle_timeout_seconds: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._idle_timeout_seconds = idle_timeout_seconds
        self._check_handle: asyncio.TimerHandle | None = None
        self._seen_cycle: Any = None
        self._unsent_bytes = 0
        self._in_headers = False
        self._num_received_bytes = 0
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check_handle is not None:
            self._check_handle.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began = not self._in_headers
        super().data_received(data)
        # Data that arrived with a request's first byte may end another request's body, and is not counted.
        if self._in_headers and not began:
            self._num_received_bytes += len(data)
            if self._num_received_bytes > MAX_HEADER_BYTES:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._num_received_bytes = self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_header_bytes(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if not self.url.startswith((b"/", b"*")):  # a whole address, whose host uvicorn drops
            cast(dict[str, Any], self.scope)[TARGET_HOST] = _host_of(self.url)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
        else:
            super().send_400_response(msg)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # ends the parsing, and makes uvicorn send a 400

    def _refuse_headers(self) -> None:
        """Refuses the request, which the application has not seen yet."""
        body = json.dumps(_HEADERS_TOO_LARGE.body()).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[_HEADERS_TOO_LARGE.status] + head + body)
        self.transport.close()

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


def _host_of(url: bytes) -> str:
    """Returns the part of an address between scheme and path: a user, a host and a port."""
    return re.split(rb"[/?#]", url.partition(b"://")[2], maxsplit=1)[0].decode("latin-1")
