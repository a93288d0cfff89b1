"""What guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple, Protocol

from jaxis.engine.scheduling.sequence import Sequence


class DraftRequest(NamedTuple):
    """A sequence whose next tokens are to be guessed.

    Attributes:
      sequence: All its tokens are known: none is in flight.
      limit: Most tokens to guess, at least 1.
    """

    sequence: Sequence
    limit: int


class Drafter(Protocol):
    """Guesses tokens. Wrong ones cannot change an answer: a guess counts only if the model samples that token."""

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """At most `limit` guesses for each request, from the next token on; empty where it has none.

        The sequences' known tokens may have grown by any number since the last call.
        """
        ...

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Learns how many of the guesses that a step computed for a sequence were right, counted from the first."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops what it keeps about a sequence, which has ended."""
        ...
