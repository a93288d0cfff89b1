"""The scheduler's output: the sequences of one step, and which of their tokens it computes."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxis.engine.scheduling.block_connector import NO_MOVES, BlockMoves
from jaxis.engine.scheduling.sequence import PromptSpan, Sequence, SequenceId
from jaxis.engine.scheduling.state_slots import StateStep


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step.

    Attributes:
      sequence: The sequence; its block tables cover what its tokens in the step see, up to start + num_tokens - 1.
      start: Position of the first token to compute.
      num_tokens: Tokens to compute, at least 1.
      samples: True if the step computes the sequence's last token, and so samples the next one.
      state: Slots of its recurrent states; None if the model has none.
      draft_token_ids: Guesses at the tokens that follow the last known token. They are computed behind it, and count in
        `num_tokens`. The step samples the token after the last known one and the token after each guess.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    state: StateStep | None = None
    draft_token_ids: tuple[int, ...] = ()

    @property
    def num_drafts(self) -> int:
        return len(self.draft_token_ids)

    @property
    def known_stop(self) -> int:
        """The position after the last token that is no draft."""
        return self.start + self.num_tokens - len(self.draft_token_ids)

    @property
    def spans(self) -> Iterator[PromptSpan]:
        """The spans of the sequence's prompt that have tokens in the step."""
        stop = self.start + self.num_tokens
        return (each for each in self.sequence.spans if each.overlaps(self.start, stop))

    @property
    def num_rows(self) -> int:
        """The tokens that the step samples for the sequence; one, which is ignored, if the entry does not sample."""
        return 1 + len(self.draft_token_ids)

    def accepted(self, sampled_token_ids: AbstractSequence[int]) -> AbstractSequence[int]:
        """Returns the tokens that extend the sequence: the first sampled token, and each sampled after a right draft.

        `sampled_token_ids` has `num_rows` tokens, in the order of positions.
        """
        if not self.draft_token_ids:
            return sampled_token_ids
        num_right = 0
        for draft, token_id in zip(self.draft_token_ids, sampled_token_ids, strict=False):
            if draft != token_id:
                break
            num_right += 1
        return sampled_token_ids[: num_right + 1]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
      scheduled: The sequences in the step: decodes first, then those with drafts, then chunks of several tokens.
      num_decodes: Leading entries that compute just the token sampled last (which may be in flight).
      preempted: Ids of the sequences that lost their blocks since the previous output.
      moves: Copies to make before the step runs.
    """

    scheduled: tuple[ScheduledSequence, ...]
    num_decodes: int
    preempted: tuple[SequenceId, ...]
    moves: BlockMoves = NO_MOVES

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes (T)."""
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def num_rows(self) -> int:
        """Tokens that the step samples (S)."""
        return len(self.scheduled) + sum(entry.num_drafts for entry in self.scheduled[self.num_decodes :])

    @property
    def has_drafts(self) -> bool:
        return any(entry.draft_token_ids for entry in self.scheduled[self.num_decodes :])

    @property
    def ranks(self) -> tuple[SchedulerOutput, ...]:
        """The step of each data rank; here the step itself, see `DataRanksOutput`."""
        return (self,)
