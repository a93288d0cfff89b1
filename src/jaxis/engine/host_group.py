"""Interface to the other hosts that run the model, for the thread that steps the engine. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxis.errors import EngineError


class HostGroup(Protocol):
    """The other hosts of the group: `Followers`, or `NO_OTHER_HOSTS`. Methods are thread-safe.

    Attributes:
      num_parameters: Parameters of the pipeline stages that this host has no part of.
      weight_bytes: Size of these stages' weights, on all devices together.
      silent: Names of the hosts whose heartbeat is overdue.
    """

    @property
    def num_parameters(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def silent(self) -> Sequence[str]: ...

    def when_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """Registers a callback for the loss of a host.

        Args:
          callback: Function to call on another thread, with the error.
          stall_seconds: Time without a heartbeat after which a host is lost.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Treats the group as lost, for a reason that the other hosts cannot notice themselves."""
        ...

    def end(self) -> None:
        """Ends the engines of the other hosts. No call may follow."""
        ...


class _NoOtherHosts:
    """The `HostGroup` of a model on this host alone."""

    num_parameters = weight_bytes = 0
    silent: Sequence[str] = ()

    def when_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """Ignores the callback: no host can be lost."""

    def give_up(self, reason: str) -> None:
        """Does nothing. The parent process notices a stuck step of this host."""

    def end(self) -> None:
        """Does nothing."""


NO_OTHER_HOSTS: HostGroup = _NoOtherHosts()
