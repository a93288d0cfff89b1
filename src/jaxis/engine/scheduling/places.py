"""The interface to places: besides blocks, some sequences need a place on the devices to run (see `Sequence.place`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlaceUse:
    """Number of places, and the keys of the sequences that run and that wait."""

    num_places: int
    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]


class Places:
    """Places by key. Sequences with one key share a place; the key b"" needs none. This base class has no places."""

    @property
    def use(self) -> PlaceUse | None:
        """The places in use; None if there are none."""
        return None

    def begin(self) -> None:
        """Starts over for a new scheduler, none of whose sequences run; it replaces the one before."""

    def join(self, key: bytes, /) -> None:
        """Adds a waiting sequence with this key. It may need a place until it leaves."""

    def leave(self, key: bytes, /) -> None:
        """Removes a sequence that joined and has ended."""

    def has_place(self, key: bytes, /) -> bool:
        """Returns whether a sequence with this key could `take` a place now."""
        return not key

    def take(self, key: bytes, /) -> None:
        """Gives a sequence that is about to run the place of its key."""

    def give_back(self, key: bytes, /) -> None:
        """Takes back the place of a sequence that no longer runs."""


NO_PLACES = Places()
