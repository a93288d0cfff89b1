"""What a sequence needs besides blocks to run, asked by the scheduler: a place for its variant of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PlaceUse:
    """Which variants of the model sequences have.

    Attributes:
      num_places: Variants that can run at once.
      running: Those of sequences that run.
      waiting: Those of sequences that wait.
    """

    num_places: int
    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]


class Places(Protocol):
    """Places for variants of the model. Sequences of one variant share a place."""

    def begin(self) -> None:
        """A new scheduler, none of whose sequences run, takes the place of the one before."""
        ...

    def join(self, variant: bytes) -> None:
        """A sequence of this variant waits to run; it may need a place until it leaves."""
        ...

    def leave(self, variant: bytes) -> None:
        """A sequence that joined has ended."""
        ...

    def has_place(self, variant: bytes) -> bool:
        """Whether a sequence of this variant could `take` a place now; always so for b"", which needs none."""
        ...

    def take(self, variant: bytes) -> None:
        """Gives a sequence that is about to run the place that there is for its variant."""
        ...

    def give_back(self, variant: bytes) -> None:
        """A sequence that took a place does not run any more."""
        ...


class NoPlaces:
    """For an engine whose sequences all run the model itself."""

    def begin(self) -> None:
        """See `Places`."""

    def join(self, variant: bytes) -> None:
        """See `Places`."""

    def leave(self, variant: bytes) -> None:
        """See `Places`."""

    def has_place(self, variant: bytes) -> bool:
        """See `Places`."""
        return not variant

    def take(self, variant: bytes) -> None:
        """See `Places`."""

    def give_back(self, variant: bytes) -> None:
        """See `Places`."""
