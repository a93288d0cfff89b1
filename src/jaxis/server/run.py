"""Runs the application under uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import socket
import time
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.errors import EngineError
from jaxis.server.app import create_models_app
from jaxis.server.config import ServerConfig
from jaxis.server.context import ServedModels
from jaxis.server.http.errors import ApiError
from jaxis.server.http.hosts import TARGET_HOST
from jaxis.server.one_model import OneModel

# HTTP connections: uvicorn's httptools protocol, with limits on headers and on idle connections.
#
# uvicorn waits indefinitely for a request's first line and headers, however long they get, for the rest of a body
# that was answered before it was complete, and for a client to read the end of an answer. Each wait holds a file
# descriptor, and most hold memory too.


MAX_HEADER_BYTES = 32 * 1024
_CHECKS_PER_TIMEOUT = 4
_HEADERS_TOO_LARGE = ApiError(
    431, f"the address and headers are larger than the {MAX_HEADER_BYTES} bytes that this server takes"
)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose headers are too large, or that is idle without a request in progress.

    The parser delivers only complete headers, so the application cannot refuse one that never ends.

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
        self._in_headers = False
        self._num_received_bytes = 0
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The event loop's call."""
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """The event loop's call."""
        if self._check_handle is not None:
            self._check_handle.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The event loop's call."""
        began = not self._in_headers
        super().data_received(data)
        # Data that arrived with a request's first byte may end another request's body, and is not counted.
        if self._in_headers and not began:
            self._num_received_bytes += len(data)
            if self._num_received_bytes > MAX_HEADER_BYTES:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        """The parser's call, at the first byte of a request."""
        super().on_message_begin()
        self._in_headers = True
        self._num_received_bytes = self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The parser's call, with a part of the address."""
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's call, with a whole header."""
        super().on_header(name, value)
        self._count_header_bytes(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The parser's call."""
        self._in_headers = False
        if not self.url.startswith((b"/", b"*")):  # a whole address, whose host uvicorn drops
            cast(dict[str, Any], self.scope)[TARGET_HOST] = _host_of(self.url)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's call for input that is not a request."""
        if self._in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
        else:
            super().send_400_response(msg)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # ends the parsing, and makes uvicorn send a 400

    def _refuse_headers(self) -> None:
        """Refuses the request in place of the application, which has not seen it yet."""
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
    """The part of an address between its scheme and its path: a user, a host and a port."""
    return re.split(rb"[/?#]", url.partition(b"://")[2], maxsplit=1)[0].decode("latin-1")


_CUT_OFF_SECONDS = 5.0  # for the answers that report why a request was cut off


class DrainingServer(uvicorn.Server):
    """Lets running requests finish after SIGTERM, and fails those that take longer than the deadline.

    It also ends when it cannot go on, which `ServedModels.failure` then tells.

    Attributes:
      app: The application.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, models: ServedModels, drain_seconds: float) -> None:
        super().__init__(config)
        self.app = app
        self._models = models
        self._drain_seconds = drain_seconds

    @property
    def failure(self) -> EngineError | None:
        """Why the server cannot go on."""
        return self._models.failure

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn several times a second; returns whether to end."""
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it is told to end."""
        drain = asyncio.create_task(self._models.drain(self._drain_seconds))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()  # all requests have ended, or a second signal says not to wait for them


def make_server(
    engine: AsyncEngine,
    config: ServerConfig,
    *,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> DrainingServer:
    """A server that is not running yet; `run(sockets=[...])` it on `listen`'s socket."""
    return make_models_server(OneModel(engine, config), config, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile)


def make_models_server(
    models: ServedModels,
    config: ServerConfig,
    *,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> DrainingServer:
    """The same for all models of a server."""
    # uvicorn calls this as it would call the class.
    protocol = functools.partial(LimitedHttpProtocol, idle_timeout_seconds=config.idle_timeout_seconds)
    app = create_models_app(models, config)
    settings = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(config.idle_timeout_seconds),
        timeout_graceful_shutdown=int(config.drain_seconds + _CUT_OFF_SECONDS),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    return DrainingServer(settings, app, models, config.drain_seconds)
