"""Counters of drafts. Imports no JAX: the server's process reads them, too."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """Results of drafts since the start.

    Attributes:
      num_drafts: Steps of a sequence that computed drafts.
      num_draft_tokens: Draft tokens computed.
      num_accepted_tokens: Draft tokens that were right.
      num_accepted_by_position: Entry i counts the drafts whose first i + 1 tokens, at least, were right.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)

    def copy(self) -> DraftCounts:
        return DraftCounts(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.num_accepted_by_position.copy(),
        )

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Returns the counts of drafts after `earlier`, a copy of these counts, was made."""
        before = earlier.num_accepted_by_position
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            [number - (before[i] if i < len(before) else 0) for i, number in enumerate(self.num_accepted_by_position)],
        )

    def add(self, num_drafts: int, num_right: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_right
        self.num_accepted_by_position += [0] * (num_drafts - len(self.num_accepted_by_position))
        for position in range(num_right):
            self.num_accepted_by_position[position] += 1
