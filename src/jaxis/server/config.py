"""How the server is set up."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.engine.async_engine import DEFAULT_MAX_QUEUED, DEFAULT_STALL_SECONDS

EMBEDDED_MODEL_NAME = "jaxis-tiny"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `jaxis serve` is told besides the engine's arguments.

    Attributes:
      served_model_names: The names under which requests may ask for the model; answers carry the first.
      api_keys: If not empty, every request must bring one of them.
      max_queued: Most completions to hold beyond those that run.
      max_body_bytes: Of a request.
      body_timeout_seconds: Longest pause while a request's body comes in.
      idle_timeout_seconds: Longest time that a connection is held without a request in progress.
      request_timeout_seconds: From a request's arrival to the end of its answer; None is no limit.
      write_timeout_seconds: How long a client may leave its stream unread before it is cut off.
      stall_seconds: How long a step may take before /health fails.
      drain_seconds: How long running requests get to end after SIGTERM.
      allowed_origins: Origins that browsers' scripts may call from; "*" is all.
    """

    served_model_names: tuple[str, ...] = (EMBEDDED_MODEL_NAME,)
    api_keys: tuple[str, ...] = ()
    max_queued: int = DEFAULT_MAX_QUEUED
    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_seconds: float = 30.0
    idle_timeout_seconds: float = 30.0
    request_timeout_seconds: float | None = 600.0
    write_timeout_seconds: float = 60.0
    stall_seconds: float = DEFAULT_STALL_SECONDS
    drain_seconds: float = 30.0
    allowed_origins: tuple[str, ...] = ()
