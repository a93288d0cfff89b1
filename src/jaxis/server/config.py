"""The server's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxis.vision.access import ImageAccess

EMBEDDED_MODEL_NAME = "jaxis-tiny"
BODY_BYTES = 8 * 2**20
"""Largest request body, unless a model needs larger requests."""


def default_served_name(model: str | None) -> str:
    """Returns the clients' name of a model without a given one: its Hub id, or the name of its folder or file."""
    if model is None:
        return EMBEDDED_MODEL_NAME
    return Path(model).name if Path(model).exists() else model


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server's settings, apart from the engine's arguments.

    Attributes:
      served_model_names: Names under which requests may ask for the model; answers carry the first.
      model_aliases: Patterns of additional names, such as "gpt-*" or "*"; answers carry the requested name.
      api_keys: Keys as text; with keys here or in a file, every request must bring one.
      api_key_file: File of keys with names and limits; see `http/api_keys.py`. None for no file.
      request_log: File with a line for every request; None for no file.
      request_log_level: Level of detail of the file; see `http/request_records.py`.
      tool_call_parser, reasoning_parser: Parsers of the model's tool calls and reasoning; "auto" chooses them by its
        chat template, "none" leaves calls or reasoning in the text.
      tool_strictness: Tools whose calls must match their schemas even when the model is free to call: "request" for
        those that a request calls strict, "always" for all.
      reasoning_budget: Most thinking tokens of any answer; None for no limit.
      effort_budgets: Thinking tokens by reasoning effort, for models whose chat template reads no effort.
      restore_thinking: True restores the thinking of this server's own answers in conversations that clients send
        without it, if the chat template keeps thinking.
      response_ttl_seconds: Time that responses stay after their last use; 0 stores nothing.
      response_store_bytes: Most bytes of all stored responses.
      response_folder: Folder in which they outlast restarts; None keeps them in memory.
      max_queued: Most completions that wait, in addition to those that run.
      max_body_bytes: Largest request body; None for `BODY_BYTES`, or for more if a model needs larger requests.
      body_timeout_seconds: Longest pause while a request body arrives.
      idle_timeout_seconds: Time that a connection stays open without a request in progress.
      request_timeout_seconds: Limit from a request's arrival to the end of its answer; None for no limit.
      write_timeout_seconds: Time that a client may leave its stream unread before it is cut off.
      stall_seconds: Duration of a step after which /health fails.
      drain_seconds: Time that running requests get to end after SIGTERM.
      sse_keep_alive_seconds: Silence of a stream after which it sends a sign of life; 0 sends none.
      strict_fields: True refuses requests with unknown fields.
      webui: True serves the chat page at /.
      ollama_api: True serves Ollama's API under /api.
      tokenizer_info: True serves the tokenizer's settings and the chat template at /tokenizer_info.
      metrics_prefix: First part of the names of the engine's metrics, before a colon.
      only_allowed_hosts: True refuses requests whose Host is neither a loopback address nor one of `allowed_hosts`.
      allowed_hosts: Host names accepted with `only_allowed_hosts`.
      allowed_origins: Origins from which browser scripts may call; "*" for all.
      lora_updates: True lets requests load and unload adapters.
      weights_root: Folder below which requests may name other weights; None if they may not.
      image_access: Places from which images named by requests are read.
      otlp_traces_endpoint: Address of an OpenTelemetry collector that gets a trace of every request; None for no
        traces.
    """

    served_model_names: tuple[str, ...] = (EMBEDDED_MODEL_NAME,)
    model_aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    request_log: Path | None = None
    request_log_level: Literal["ids-and-usage", "full"] = "ids-and-usage"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    tool_strictness: Literal["request", "always"] = "request"
    reasoning_budget: int | None = None
    effort_budgets: Mapping[str, int] = field(default_factory=dict)
    restore_thinking: bool = True
    response_ttl_seconds: float = 30 * 86400.0
    response_store_bytes: int = 256 * 1024 * 1024
    response_folder: Path | None = None
    max_queued: int = 512
    max_body_bytes: int | None = None
    body_timeout_seconds: float = 30.0
    idle_timeout_seconds: float = 30.0
    request_timeout_seconds: float | None = 600.0
    write_timeout_seconds: float = 60.0
    stall_seconds: float = 120.0
    drain_seconds: float = 30.0
    sse_keep_alive_seconds: float = 15.0
    strict_fields: bool = False
    webui: bool = True
    ollama_api: bool = True
    tokenizer_info: bool = True
    metrics_prefix: str = "jaxis"
    only_allowed_hosts: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    lora_updates: bool = False
    weights_root: Path | None = None
    image_access: ImageAccess = field(default_factory=ImageAccess)
    otlp_traces_endpoint: str | None = None

    @property
    def needs_key(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None
