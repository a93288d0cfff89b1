"""What a sequence needs besides blocks to run, asked by the scheduler: a place for its adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PlaceUse:
    """Which adapters sequences have.

    Attributes:
      num_places: Adapters that can run at once.
      running: Those of sequences that run.
      waiting: Those of sequences that wait.
    """

    num_places: int
    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]


class Places(Protocol):
    """Places for adapters. Sequences of one adapter share a place."""

    def begin(self) -> None:
        """A new scheduler, none of whose sequences run, takes the place of the one before."""
        ...

    def join(self, adapter: bytes) -> None:
        """A sequence of this adapter waits to run; it may need a place until it leaves."""
        ...

    def leave(self, adapter: bytes) -> None:
        """A sequence that joined has ended."""
        ...

    def has_place(self, adapter: bytes) -> bool:
        """Whether a sequence of this adapter could `take` a place now; always so for b"", which needs none."""
        ...

    def take(self, adapter: bytes) -> None:
        """Gives a sequence that is about to run the place that there is for its adapter."""
        ...

    def give_back(self, adapter: bytes) -> None:
        """A sequence that took a place does not run any more."""
        ...


class NoPlaces:
    """For an engine whose sequences all run the model itself."""

    def begin(self) -> None:
        """See `Places`."""

    def join(self, adapter: bytes) -> None:
        """See `Places`."""

    def leave(self, adapter: bytes) -> None:
        """See `Places`."""

    def has_place(self, adapter: bytes) -> bool:
        """See `Places`."""
        return not adapter

    def take(self, adapter: bytes) -> None:
        """See `Places`."""

    def give_back(self, adapter: bytes) -> None:
        """See `Places`."""
