"""`jaxis serve`'s application on Ray Serve: replicas of one model behind one address.

    serve run jaxis.integrations.ray_serve:build model=Qwen/Qwen3-0.6B num_replicas=2

A replica is an actor with the web application, and with an engine in a process of its own, as in `jaxis serve`. With
`nnodes`, its model also runs on other hosts, in an actor on each. Ray routes requests, replaces replicas that die or
make no progress, and scales their number.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.client.engine_process import EngineProcess, LogSettings
from jaxis.errors import EngineError
from jaxis.integrations.ray_arguments import ServeArguments
from jaxis.integrations.ray_hosts import ReplicaHosts
from jaxis.integrations.ray_replicas import use_reserved_cpus
from jaxis.server.app import create_app
from jaxis.server.config import ServerConfig
from jaxis.server.listener import allow_many_connections


class JaxisServer:
    """A replica: an engine and its server. Ray Serve creates it, through `build`.

    Args:
      engine_arguments: Arguments of `EngineArgs`; without a seed, each replica draws one, as `jaxis serve` does.
      config: Configuration of the server.

    Raises:
      JaxisError: Building the engine failed.
    """

    def __init__(self, engine_arguments: Mapping[str, Any], config: ServerConfig) -> None:
        use_reserved_cpus()
        allow_many_connections()
        log = LogSettings(as_json=False, level=logging.INFO)
        arguments: dict[str, Any] = {"seed": secrets.randbits(32), **engine_arguments}
        args = EngineArgs(**arguments)
        max_restarts = None
        if args.nnodes > 1:
            self._hosts = ReplicaHosts(args)
            arguments |= self._hosts.leader_arguments
            max_restarts = 0  # a host that is lost may need another node, which Ray finds for a new replica
        self._process = EngineProcess(arguments, stall_seconds=config.stall_seconds, log=log, max_restarts=max_restarts)
        self._engine = AsyncLLMEngine(self._process, max_queued=config.max_queued, stall_seconds=config.stall_seconds)
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Hook of Ray Serve, which also runs the application's startup and shutdown."""
        return create_app(self._engine, self._config)

    async def check_health(self) -> None:
        """Hook of Ray Serve, which replaces a replica after several failures.

        Raises:
          EngineError: The engine has failed permanently, or makes no progress. Compiling a program is progress.
        """
        if self._engine.failure is not None:
            raise self._engine.failure
        if not self._engine.is_making_progress:
            raise EngineError("the engine makes no progress")


def build(arguments: dict[str, Any]) -> serve.Application:
    """Makes an application of Ray Serve.

    Args:
      arguments: Arguments of the engine (see `EngineArgs`), the server (see `ServerConfig`) and the deployment (see
        `serve.deployment`), by name.

    Raises:
      ConfigError: An argument is unknown, or a value cannot be honoured.
    """
    given = ServeArguments.of(arguments)
    deployment = serve.deployment(**given.deployment)(serve.ingress()(JaxisServer))
    return deployment.bind(given.engine, given.config)
