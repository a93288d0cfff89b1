"""The interface to adapter places: besides blocks, a sequence with an adapter needs a place for it to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PlaceUse:
    """Number of adapters that can run at once, and the adapters of the sequences that run and that wait."""

    num_places: int
    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]


class Places(Protocol):
    """Places for adapters. Sequences of one adapter share a place."""

    def begin(self) -> None:
        """Starts over for a new scheduler, none of whose sequences run; it replaces the one before."""
        ...

    def join(self, adapter: bytes) -> None:
        """Adds a waiting sequence of this adapter. It may need a place until it leaves."""
        ...

    def leave(self, adapter: bytes) -> None:
        """Removes a sequence that joined and has ended."""
        ...

    def has_place(self, adapter: bytes) -> bool:
        """Returns whether a sequence of this adapter could `take` a place now; True for b"", which needs none."""
        ...

    def take(self, adapter: bytes) -> None:
        """Gives a sequence that is about to run the place of its adapter."""
        ...

    def give_back(self, adapter: bytes) -> None:
        """Takes back the place of a sequence that no longer runs."""
        ...


class NoPlaces:
    """The `Places` of an engine without adapters."""

    def begin(self) -> None:
        pass

    def join(self, adapter: bytes) -> None:
        pass

    def leave(self, adapter: bytes) -> None:
        pass

    def has_place(self, adapter: bytes) -> bool:
        return not adapter

    def take(self, adapter: bytes) -> None:
        pass

    def give_back(self, adapter: bytes) -> None:
        pass
