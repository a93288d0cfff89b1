"""Runs the application under uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from typing import cast

import uvicorn
from fastapi import FastAPI

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.errors import EngineError
from jaxis.server.app import create_models_app
from jaxis.server.config import ServerConfig
from jaxis.server.context import ServedModels
from jaxis.server.http.connections import LimitedHttpProtocol
from jaxis.server.one_model import OneModel

_CUT_OFF_SECONDS = 5.0  # for the answers that report why a request was cut off


class DrainingServer(uvicorn.Server):
    """Lets running requests finish after SIGTERM, and fails those that take longer than the deadline.

    It also ends when `ServedModels.failure` is set.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, models: ServedModels, drain_seconds: float) -> None:
        super().__init__(config)
        self.app = app
        self._models = models
        self._drain_seconds = drain_seconds

    @property
    def failure(self) -> EngineError | None:
        return self._models.failure

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end; uvicorn calls it several times a second."""
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains the requests and ends; uvicorn calls it when it is told to end."""
        drain = asyncio.create_task(self._models.drain(self._drain_seconds))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()  # all requests have ended, or a second signal came


def make_server(
    engine: AsyncEngine,
    config: ServerConfig,
    *,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> DrainingServer:
    """Makes a server of one engine. Start it by `run(sockets=[...])` on the socket of `listen`."""
    return make_models_server(OneModel(engine, config), config, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile)


def make_models_server(
    models: ServedModels,
    config: ServerConfig,
    *,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> DrainingServer:
    """Makes a server of several models; see `make_server`."""
    # uvicorn calls this in place of the class.
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
