"""The server's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxis.vision.access import ImageAccess

EMBEDDED_MODEL_NAME = "jaxis-tiny"
BODY_BYTES = 8 * 2**20
"""The largest request body, unless a model's requests may have to be larger."""


def default_served_name(model: str | None) -> str:
    """The name for clients of a model without one: its Hub id, or the name of its folder or file."""
    if model is None:
        return EMBEDDED_MODEL_NAME
    return Path(model).name if Path(model).exists() else model


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server's settings, apart from the engine's arguments.

    Attributes:
      served_model_names: The names under which requests may ask for the model; answers carry the first.
      model_aliases: Patterns of more such names, such as "gpt-*" or "*"; answers carry the name that was asked for.
      api_keys: Keys as text; if there are any, or a file of them, every request must bring one.
      api_key_file: A file of keys with names and limits; see `http/api_keys.py`. None is none.
      request_log: A file that gets a line for every request; None is none.
      request_log_level: What it says of them; see `http/request_records.py`.
      tool_call_parser, reasoning_parser: How the model writes its tool calls and its reasoning: "auto" looks into its
        chat template, "none" leaves them in the text.
      tool_strictness: Whose calls must fit their schemas where the model decides to call: "request" holds those that
        a request calls strict, "always" all.
      reasoning_budget: Most tokens that any answer may think; None is no limit.
      effort_budgets: How many tokens a model may think at a reasoning effort, where its chat template reads none.
      restore_thinking: Put the thinking of this server's own answers back into conversations that clients send without
        it, where the chat template keeps thinking.
      response_ttl_seconds: How long responses and conversations stay after their last use; 0 stores nothing.
      response_store_bytes: Most bytes of all of them.
      response_folder: Where they are stored, over restarts; None keeps them in memory.
      max_queued: Most completions to hold beyond those that run.
      max_body_bytes: Largest request body; None: `BODY_BYTES`, or what a model's requests may need beyond that.
      body_timeout_seconds: Longest pause while a request body arrives.
      idle_timeout_seconds: How long a connection is kept open without a request in progress.
      request_timeout_seconds: Limit from a request's arrival to the end of its answer; None is no limit.
      write_timeout_seconds: How long a client may leave its stream unread before it is cut off.
      stall_seconds: How long a step may take before /health fails.
      drain_seconds: How long running requests get to end after SIGTERM.
      sse_keep_alive_seconds: How long a stream may be silent before it gets a sign of life; 0 sends none.
      strict_fields: Refuse requests with fields that are unknown.
      webui: Serve the chat page at /.
      ollama_api: Serve Ollama's API under /api.
      tokenizer_info: Tell the tokenizer's settings and the chat template at /tokenizer_info.
      metrics_prefix: What the names of the engine's metrics begin with, before a colon.
      only_allowed_hosts: Refuse requests whose Host is neither a loopback address nor one of `allowed_hosts`.
      allowed_hosts: Host names accepted with `only_allowed_hosts`.
      allowed_origins: Origins from which browser scripts may call; "*" is all.
      lora_updates: Load and unload adapters by requests.
      weights_root: The folder below which requests may name other weights; None: they may not.
      image_access: From where images are read that requests name.
      otlp_traces_endpoint: Address of an OpenTelemetry collector that gets a trace of every request; None is none.
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
        """Whether requests must bring a key."""
        return bool(self.api_keys) or self.api_key_file is not None
