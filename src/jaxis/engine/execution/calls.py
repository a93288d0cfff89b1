"""Functions of an engine that the server's process calls by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class EngineCall:
    """A function that another process calls.

    Attributes:
      run: Function that the engine's thread calls between two steps. Its result is a value that MessagePack has, or a
        Future of one.
      read: Function that gets the call's arguments before that, in another thread, and returns those of `run`; None:
        they are the same.
      settles: True if the outputs of steps in flight are delivered before `run`.
    """

    run: Callable[..., Any]
    read: Callable[..., Sequence[Any]] | None = None
    settles: bool = False


Calls: TypeAlias = Mapping[str, EngineCall]
"""Functions by name. Each room of the engine has its own table."""
