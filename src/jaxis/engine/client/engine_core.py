"""The work of an engine's thread: what differs between an engine that generates and one that makes vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from jaxis.engine.client.engine_client import EngineStats
from jaxis.engine.client.wire import AbortRequest, AddRequest, EngineOutputs
from jaxis.engine.host_group import NO_OTHER_HOSTS, HostGroup
from jaxis.errors import RequestError

if TYPE_CHECKING:
    from jaxis.engine.execution.calls import Calls
    from jaxis.engine.execution.programs import CompileWait


class EngineCore(Protocol):
    """Steps of an engine. Its thread alone calls the methods, except where they say otherwise.

    Attributes:
      calls: Functions for the server, by name.
      hosts: The other hosts that run the model.
    """

    calls: Calls
    hosts: HostGroup = NO_OTHER_HOSTS
    _post: Callable[[EngineOutputs], None]
    _do: Callable[[Callable[[], None]], None]

    def connect(self, post: Callable[[EngineOutputs], None], do: Callable[[Callable[[], None]], None]) -> None:
        """Connects the core with its thread.

        Args:
          post: Function that sends outputs to the server.
          do: Function that runs another function in the thread, between two steps. Any thread may call it.
        """
        self._post, self._do = post, do

    def take(self, command: AddRequest | AbortRequest) -> None:  # noqa: ARG002
        """Takes a command for a request. Called by another thread."""
        raise RequestError("this engine generates nothing")

    @property
    def has_work(self) -> bool:
        """True if there is a step to run."""
        ...

    @property
    def is_failing(self) -> bool:
        """True if too many of the last steps have failed. Other threads read it."""
        return False

    @property
    def stats(self) -> EngineStats:
        """State of the engine after its last step."""
        ...

    @property
    def compile_wait(self) -> CompileWait | None:
        """The last wait of a step for a program to compile. Other threads read it."""
        ...

    def step(self) -> None:
        """Runs a step if there is one, and posts its outputs."""
        ...

    def settle(self) -> None:
        """Waits for steps in flight, and posts their outputs."""

    def idle(self) -> None:
        """Does what is left to do when there is no step and no command."""

    def renewed(self, stats: EngineStats) -> EngineStats:
        """Adds what happens between steps to `stats`. Called by another thread."""
        return stats

    def end(self) -> None:
        """Ends every request; no step follows."""

    def close(self) -> None:
        """Closes what outlives the thread. Called by another thread, after its end."""
