"""Which running sequences get drafts, and how many: the engine's side of speculative decoding.

A draft costs a row of a step, and a step with drafts cannot be dispatched before the one ahead of it was read. So a
sequence gets none until a guess at its next token, which costs nothing, has come true, and none any more once a step's
guesses were all wrong. Answers never depend on any of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.drafting.draft_length import DraftLengths, DraftPlace
from jaxis.engine.drafting.drafter import Drafter, DraftRequest, FollowsSteps
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus

# A sequence for which drafts do not pay is left alone for so many tokens.
PAUSE_TOKENS = 64


@dataclass
class _Drafting:
    """How drafting goes for one sequence.

    Attributes:
      sequence: The sequence.
      place: Its chances.
      is_drafting: Whether it gets drafts; otherwise guesses are only compared.
      expected: The guess at its next token.
      paused_until: No guesses are made before its output has so many tokens.
    """

    sequence: Sequence
    place: DraftPlace
    is_drafting: bool
    expected: int | None = None
    paused_until: int = 0


class Speculation:
    """Asks a drafter for drafts of the sequences for which they pay.

    Attributes:
      drafter: Makes the guesses.
      lengths: Chooses how many.
      counts: What became of them.

    Args:
      drafter: Makes the guesses.
      lengths: Chooses how many.
      max_drafts: Most drafts of a sequence in a step.
    """

    def __init__(self, drafter: Drafter, lengths: DraftLengths, *, max_drafts: int) -> None:
        self.drafter, self.lengths = drafter, lengths
        self.counts = DraftCounts()
        self._max_drafts = max_drafts
        self._follows_steps = isinstance(drafter, FollowsSteps)
        self._sequences: dict[SequenceId, _Drafting] = {}

    @property
    def wants_newest_tokens(self) -> bool:
        """Whether the next step may have drafts, for which the newest tokens must be known."""
        return self._follows_steps or any(
            drafting.is_drafting and drafting.sequence.status is SequenceStatus.RUNNING
            for drafting in self._sequences.values()
        )

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> dict[SequenceId, AbstractSequence[int]]:
        """Drafts for the next step, by sequence; of those with a token in flight there are none.

        Args:
          sampling: Each unfinished sequence's sampling state.
          num_running: Sequences that run.
        """
        drafting = [each for each in self._sequences.values() if each.is_drafting and _is_known(each.sequence)]
        if not drafting:
            if self._follows_steps:
                self.drafter.propose(())
            return {}
        lengths = self.lengths.choose([each.place for each in drafting], num_running)
        if lengths is None:
            return {}
        requests = []
        for each, length in zip(drafting, lengths, strict=True):
            room = each.sequence.max_total_tokens - each.sequence.num_tokens - 1
            if length == 0:
                self._pause(each)
            elif room > 0:
                requests.append(DraftRequest(each.sequence, min(length, room)))
        proposed: dict[SequenceId, AbstractSequence[int]] = {}
        guesses = self.drafter.propose(requests) if requests or self._follows_steps else ()
        for request, token_ids in zip(requests, guesses, strict=True):
            seq_id = request.sequence.seq_id
            token_ids = sampling[seq_id].allowed_drafts(token_ids[: request.limit])
            if token_ids:
                proposed[seq_id] = token_ids
            elif self.drafter.needs_match:
                self._sequences[seq_id].is_drafting = False
        return proposed

    def observe(self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]) -> None:
        """Learns that a step's tokens were taken in.

        Args:
          output: The step.
          new_token_ids: For each of its entries, as the scheduler's `update` got them.
        """
        for entry, token_ids in zip(output.scheduled, new_token_ids, strict=True):
            if entry.samples:
                self._observe(entry, len(token_ids))

    def observe_time(self, output: SchedulerOutput, seconds: float) -> None:
        """Learns how long a step took."""
        if all(entry.num_tokens == entry.num_rows for entry in output.scheduled):
            self.lengths.record(len(output.ranks) * output.num_tokens, seconds)

    def _observe(self, entry: ScheduledSequence, num_new_tokens: int) -> None:
        sequence = entry.sequence
        drafting = self._sequences.get(sequence.seq_id)
        if drafting is None or drafting.sequence is not sequence:
            drafting = self._begin(sequence)
        if drafting is None:
            return
        if entry.num_drafts:
            # Drafts behind an end were not looked at.
            num_right = max(num_new_tokens - 1, 0)
            num_seen = entry.num_drafts if not sequence.status.finished else num_right
            self.counts.add(entry.num_drafts, num_right)
            self.drafter.observe(sequence, entry.num_drafts, num_right)
            drafting.place.observe(num_seen, num_right)
            if num_right == 0 and self.drafter.needs_match:
                drafting.is_drafting = False
        if sequence.status.finished:
            self.forget(sequence)
        elif not drafting.is_drafting:
            self._compare(drafting)

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept about a sequence, which has ended."""
        if self._sequences.pop(sequence.seq_id, None) is not None:
            self.drafter.forget(sequence)

    def reset(self) -> None:
        """Drops what is kept about every sequence."""
        for drafting in list(self._sequences.values()):
            self.forget(drafting.sequence)

    def _begin(self, sequence: Sequence) -> _Drafting | None:
        wanted = sequence.sampling_params.num_speculative_tokens
        max_drafts = self._max_drafts if wanted is None else min(wanted, self._max_drafts)
        if max_drafts == 0 or sequence.status.finished:
            return None
        drafting = _Drafting(sequence, DraftPlace(max_drafts), not self.drafter.needs_match)
        self._sequences[sequence.seq_id] = drafting
        return drafting

    def _compare(self, drafting: _Drafting) -> None:
        """Begins to draft for a sequence if the guess at its newest token was right; else makes another guess."""
        sequence = drafting.sequence
        if len(sequence.output_token_ids) < drafting.paused_until:
            return
        if not self.drafter.needs_match or drafting.expected == sequence.output_token_ids[-1]:
            drafting.is_drafting, drafting.expected = True, None
            return
        [guess] = self.drafter.propose([DraftRequest(sequence, 1)])
        drafting.expected = guess[0] if guess else None

    def _pause(self, drafting: _Drafting) -> None:
        drafting.is_drafting, drafting.expected = False, None
        drafting.paused_until = len(drafting.sequence.output_token_ids) + PAUSE_TOKENS
        drafting.place.reset()


def _is_known(sequence: Sequence) -> bool:
    """Whether the host knows all tokens of a running sequence, and the next step is to compute the last one."""
    return (
        sequence.status is SequenceStatus.RUNNING
        and sequence.num_inflight_tokens == 0
        and sequence.num_computed_tokens + 1 == sequence.num_tokens
    )
