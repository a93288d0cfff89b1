"""The other hosts that run the model with this one, as the thread that steps the engine sees them. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxis.errors import EngineError


class HostGroup(Protocol):
    """The other hosts of the group; `Followers`, or `NO_OTHER_HOSTS`. Any thread may call the methods.

    Attributes:
      num_parameters: Parameters of the pipeline stages that this host has no part of.
      weight_bytes: Bytes of these stages' weights, on all devices together.
      silent: Names of the hosts that have not been heard of for some time.
    """

    @property
    def num_parameters(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def silent(self) -> Sequence[str]: ...

    def when_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """Has a function called, on another thread, when a host is lost.

        Args:
          callback: The function.
          stall_seconds: How long a host may be silent before it is lost.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Takes the other hosts for lost, for a reason that they cannot have noticed themselves."""
        ...

    def end(self) -> None:
        """Ends the engines of the other hosts; no call may follow."""
        ...


class _NoOtherHosts:
    """The `HostGroup` of a model that runs on this host alone."""

    num_parameters = weight_bytes = 0
    silent: Sequence[str] = ()

    def when_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """Never calls the function."""

    def give_up(self, reason: str) -> None:
        """Does nothing: a stuck step of this host is noticed by the process that watches this one."""

    def end(self) -> None:
        """Does nothing."""


NO_OTHER_HOSTS: HostGroup = _NoOtherHosts()
