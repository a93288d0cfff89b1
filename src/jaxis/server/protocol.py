"""A protocol of the server as one object, and the table of modules that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module

from fastapi import APIRouter
from starlette.datastructures import State

from jaxis.rooms import has_room
from jaxis.server.clients import Client
from jaxis.server.config import ServerConfig
from jaxis.server.http.errors import ErrorDialect

# Module of jaxis.server with a `PROTOCOL` -> rooms that it needs besides its own.
_MODULES: dict[str, tuple[str, ...]] = {
    "anthropic.routes": (),
    "openai.routes": (),
    "routes.models": (),
    "several.routes": (),
    "routes.tokenizer_info": (),
    "llama_cpp": (),
    "lora.routes": (),
    "tokens.routes": (),
    "routes.operations": (),
    "routes.requests": (),
    "weights.routes": (),
    "ollama.routes": (),
    "pooling.ollama": ("pooling", "server.ollama"),
    "pooling.routes": ("pooling",),
}


def _always(config: ServerConfig) -> bool:  # noqa: ARG001
    return True


def _attach_nothing(state: State, config: ServerConfig, stack: ExitStack) -> None:
    del state, config, stack


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A protocol, or another part of the server's HTTP interface.

    Attributes:
      routers: Its routes.
      is_on: Decision by the server's configuration whether it has routes.
      errors: Forms of its errors and of its streams before their first event.
      browser_headers: Headers that its clients send from browsers.
      clients: Ready-made clients that speak it.
      greeting: Answer at / to clients that look there for a server; "" if they look for none.
      attach: Adds what its routes need to the application's state; the stack closes when the server ends. Raises
        ConfigError.
    """

    routers: Sequence[APIRouter]
    is_on: Callable[[ServerConfig], bool] = _always
    errors: Sequence[ErrorDialect] = ()
    browser_headers: Sequence[str] = ()
    clients: Sequence[Client] = ()
    greeting: str = ""
    attach: Callable[[State, ServerConfig, ExitStack], None] = _attach_nothing


def protocols() -> list[Protocol]:
    """Returns the protocols of the rooms that this installation has."""
    return [
        import_module(f"jaxis.server.{name}").PROTOCOL
        for name, needed in _MODULES.items()
        if all(map(has_room, (f"server.{name}", *needed)))
    ]
