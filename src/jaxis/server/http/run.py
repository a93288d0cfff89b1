"""Runs the application under uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import functools
import math
import resource
import socket
from typing import cast

import uvicorn
from fastapi import FastAPI

from jaxis.engine.frontend.async_engine import AsyncLLMEngine
from jaxis.errors import ConfigError
from jaxis.server.config import ServerConfig
from jaxis.server.http.app import create_app
from jaxis.server.http.http_protocol import LimitedHttpProtocol

MAX_OPEN_FILES = 65536
_CUT_OFF_SECONDS = 5.0  # for the answers that report why a request was cut off


class DrainingServer(uvicorn.Server):
    """Lets running requests finish after SIGTERM, and fails those that take longer than the deadline.

    It also ends when its engine has failed for good, which `AsyncLLMEngine.failure` then tells.

    Attributes:
      app: The application.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, engine: AsyncLLMEngine, drain_seconds: float) -> None:
        super().__init__(config)
        self.app = app
        self._engine = engine
        self._drain_seconds = drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn several times a second; returns whether to end."""
        return await super().on_tick(counter) or self._engine.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it is told to end."""
        drain = asyncio.create_task(self._engine.drain(self._drain_seconds))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()  # all requests have ended, or a second signal says not to wait for them


def make_server(
    engine: AsyncLLMEngine,
    config: ServerConfig,
    *,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> DrainingServer:
    """A server that is not running yet; `run(sockets=[...])` it on `listen`'s socket."""
    # uvicorn calls this as it would call the class.
    protocol = functools.partial(LimitedHttpProtocol, idle_timeout_seconds=config.idle_timeout_seconds)
    app = create_app(engine, config)
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
    return DrainingServer(settings, app, engine, config.drain_seconds)


def allow_many_connections() -> None:
    """Raises this process's limit on open files as far as permitted: it is often 1,024, and connections count."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MAX_OPEN_FILES)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
      ConfigError: The address is in use, or is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener
