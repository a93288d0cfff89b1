"""Which running sequences get drafts, and how many: the engine's side of speculative decoding.

A draft costs a row of a step, and a step with drafts cannot be dispatched before the one ahead of it was read. So a
sequence gets none until a guess at its next token, which costs nothing, has come true, and none any more once a step's
guesses were all wrong. Guesses at the next token are compared all the while, which tells the chance that drafts are
right before any is computed: beside many others, few sequences' drafts do not pay, but those of enough of them do.
Answers never depend on any of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.drafting.draft_length import DraftLengths, DraftPlace
from jaxis.engine.drafting.drafter import Drafter, DraftRequest, FollowsSteps
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus

# A sequence whose drafts cost their making, and do not pay, is left alone for so many tokens.
PAUSE_TOKENS = 64
# After so many tokens without a guess, the next one must come true before there are drafts.
MAX_UNGUESSED_TOKENS = 8


@dataclass
class _Drafting:
    """How drafting goes for one sequence.

    Attributes:
      sequence: The sequence.
      place: Its chances.
      is_trusted: Whether it may get drafts; otherwise guesses are only compared.
      expected: The guess at its next token.
      num_unguessed: Newest tokens in a row that there was no guess at.
      paused_until: It gets no drafts before its output has so many tokens.
    """

    sequence: Sequence
    place: DraftPlace
    is_trusted: bool
    expected: int | None = None
    num_unguessed: int = 0
    paused_until: int = 0

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Learns what became of guesses, computed or only compared."""
        self.place.observe(num_guesses, num_right)
        self.is_trusted = num_right > 0


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

    def wants_newest_tokens(self, num_running: int) -> bool:
        """Whether the next step is to have drafts, for which the newest tokens must be known.

        Args:
          num_running: Sequences that run.
        """
        if self._follows_steps:
            return True
        ready = [each.place for each in self._ready() if each.sequence.status is SequenceStatus.RUNNING]
        return bool(ready) and any(self.lengths.choose(ready, num_running) or ())

    def prepare(self, num_running: int) -> None:
        """Has the programs compiled that a sequence's first drafts need.

        Args:
          num_running: Sequences that will run, it included.
        """
        self.lengths.choose([DraftPlace(self._max_drafts)], num_running)

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> dict[SequenceId, AbstractSequence[int]]:
        """Drafts for the next step, by sequence; of those with a token in flight there are none.

        Args:
          sampling: Each unfinished sequence's sampling state.
          num_running: Sequences that run.
        """
        drafting = [each for each in self._ready() if each.sequence.is_known]
        lengths = self.lengths.choose([each.place for each in drafting], num_running) if drafting else None
        requests = []
        for each, length in zip(drafting, lengths or [], strict=lengths is not None):
            room = each.sequence.max_total_tokens - each.sequence.num_tokens - 1
            if length > 0 and room > 0:
                requests.append(DraftRequest(each.sequence, min(length, room)))
            elif length == 0 and not self.drafter.needs_match:
                each.paused_until = len(each.sequence.output_token_ids) + PAUSE_TOKENS
                each.place.reset()
        proposed: dict[SequenceId, AbstractSequence[int]] = {}
        guesses = self.drafter.propose(requests) if requests or self._follows_steps else ()
        for request, token_ids in zip(requests, guesses, strict=True):
            seq_id = request.sequence.seq_id
            if token_ids := sampling[seq_id].allowed_drafts(token_ids[: request.limit]):
                proposed[seq_id] = token_ids
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
            drafting.observe(num_seen, num_right)
        elif drafting.expected is not None:
            drafting.observe(1, int(drafting.expected == sequence.output_token_ids[-1]))
        if sequence.status.finished:
            self.forget(sequence)
        elif self.drafter.needs_match:
            self._guess(drafting)

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
        drafting = _Drafting(sequence, DraftPlace(max_drafts), is_trusted=False)
        self._sequences[sequence.seq_id] = drafting
        return drafting

    def _guess(self, drafting: _Drafting) -> None:
        """Guesses a sequence's next token."""
        [guess] = self.drafter.propose([DraftRequest(drafting.sequence, 1)])
        drafting.expected = guess[0] if guess else None
        drafting.num_unguessed = 0 if guess else drafting.num_unguessed + 1
        if drafting.num_unguessed > MAX_UNGUESSED_TOKENS:
            drafting.is_trusted = False

    def _ready(self) -> list[_Drafting]:
        """The sequences that may get drafts in the next step."""
        if not self.drafter.needs_match:
            return [d for d in self._sequences.values() if len(d.sequence.output_token_ids) >= d.paused_until]
        return [d for d in self._sequences.values() if d.is_trusted and d.expected is not None]
