"""Arguments of an application on Ray Serve: of the engine, the server and the deployment, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ray import serve

from jaxis.config.vllm_config import SchedulerConfig
from jaxis.config.yaml_file import parse_yaml
from jaxis.engine.argument_groups.fields import argument_types
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from jaxis.integrations.ray_hosts import host_bundles
from jaxis.server.config import ServerConfig, default_served_name

# Options of a deployment. The first parameter is the class; the second and third name it.
DEPLOYMENT_OPTIONS = frozenset(list(inspect.signature(serve.deployment).parameters)[3:])
_CUT_OFF_SECONDS = 5.0  # after the time to drain, for the answers that report why a request was cut off
_HEALTH_CHECK_TIMEOUT_SECONDS = 60.0
_CONSTRUCTOR_RETRIES = 3  # a wrong path stays wrong


@dataclass(frozen=True)
class ServeArguments:
    """Arguments of `build`, sorted.

    Attributes:
      engine: Arguments of each replica's `EngineArgs`.
      config: Configuration of each replica's server.
      deployment: Options of `serve.deployment`.
    """

    engine: dict[str, Any]
    config: ServerConfig
    deployment: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ServeArguments:
        """Sorts and checks arguments. A command line gives strings, which are YAML if they begin with [ or {.

        Raises:
          ConfigError: An argument is unknown, or a value cannot be honoured.
        """
        engine_types, server_types = argument_types(), get_type_hints(ServerConfig)
        engine: dict[str, Any] = {}
        server: dict[str, Any] = {}
        deployment: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
                value = parse_yaml(value, name)
            if name in engine_types:
                engine[name] = _converted(name, value, engine_types[name])
            elif name in server_types:
                server[name] = _converted(name, value, server_types[name])
            elif name in DEPLOYMENT_OPTIONS:
                deployment[name] = _number_of(value)
            else:
                raise ConfigError(
                    f"{name}={value!r} is no argument of an engine (such as max_model_len), a server (such as "
                    "max_queued) or a deployment of Ray Serve (such as num_replicas)"
                )
        engine.setdefault("fit_memory", engine.get("model") is not None)
        arguments = EngineArgs(**engine)
        if arguments.nnodes > 1:
            _place_hosts(arguments.nnodes, engine, deployment)
        server.setdefault("served_model_names", (default_served_name(arguments.model),))
        config = ServerConfig(**server)
        return cls(engine, config, _deployment_defaults(arguments, config) | deployment)


def _deployment_defaults(arguments: EngineArgs, config: ServerConfig) -> dict[str, Any]:
    """Returns options whose defaults in Ray do not suit an engine."""
    return {
        # As many as the engine accepts: Ray's small default would leave its batch empty.
        "max_ongoing_requests": (arguments.max_num_seqs or SchedulerConfig.max_num_seqs) + config.max_queued,
        "graceful_shutdown_timeout_s": config.drain_seconds + _CUT_OFF_SECONDS,
        "health_check_timeout_s": _HEALTH_CHECK_TIMEOUT_SECONDS,
        "max_constructor_retry_count": _CONSTRUCTOR_RETRIES,
    }


def _place_hosts(num_hosts: int, engine: Mapping[str, Any], deployment: dict[str, Any]) -> None:
    """Reserves a bundle for each host of a replica, by default on separate nodes.

    Raises:
      ConfigError: The given placement cannot be honoured.
    """
    for name in ("master_addr", "master_port"):
        if name in engine:
            raise ConfigError(f"{name}={engine[name]!r} is not known before Ray has placed the hosts: leave it out")
    bundles = deployment.setdefault(
        "placement_group_bundles", host_bundles(num_hosts, deployment.get("ray_actor_options") or {})
    )
    if len(bundles) != num_hosts:
        raise ConfigError(f"placement_group_bundles has {len(bundles)} bundles: nnodes={num_hosts} needs one a host")
    deployment.setdefault("placement_group_strategy", "STRICT_SPREAD")


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name}={value!r} cannot be used: {error.errors()[0]['msg']}") from None


def _number_of(value: Any) -> Any:
    """Converts a number in a string; returns any other value unchanged, such as num_replicas=auto."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


assert not DEPLOYMENT_OPTIONS & {argument.name for argument in (*fields(EngineArgs), *fields(ServerConfig))}
