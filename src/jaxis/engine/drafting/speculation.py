"""Which running sequences get drafts, and how many: the engine's side of speculative decoding.

A draft costs a row of a step, and a step with drafts cannot be dispatched before the one ahead of it was read. So a
sequence gets none until a guess at its next token, which costs nothing, has come true, and none any more once a step's
guesses were all wrong. Guesses at the next token are compared all the while, which tells the chance that drafts are
right before any is computed: beside many others, few sequences' drafts do not pay, but those of enough of them do.
To look for guesses takes time of the host: where there was none for long, every few tokens are enough, and what all of
it may cost is measured (`DraftBudget`). Answers never depend on any of this.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from jaxis.engine.drafting.draft_budget import DraftBudget
from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.drafting.draft_length import DraftLengths, DraftPlace
from jaxis.engine.drafting.drafter import Drafter, DraftRequest
from jaxis.engine.drafting.proposals import max_drafts_of, propose_drafts, verified
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus

# After so many tokens without a guess, the next one must come true before there are drafts.
MAX_UNGUESSED_TOKENS = 8
# After this many times N tokens without a guess, one is looked for every N tokens, and at least every so many.
UNGUESSED_TOKENS_PER_LOOK, MAX_TOKENS_PER_LOOK = 8, 8


@dataclass
class _Drafting:
    """How drafting goes for one sequence.

    Attributes:
      sequence: The sequence.
      place: Its chances.
      expected: The guess at the next token of the output while it has `num_seen` tokens.
      num_seen: Tokens that its output had when a guess was looked for.
      num_guessed: Tokens that it had when there last was one.
      next_look: No guess is looked for before it has so many.
    """

    sequence: Sequence
    place: DraftPlace
    expected: int | None = None
    num_seen: int = 0
    num_guessed: int = 0
    next_look: int = 0

    @property
    def has_guess(self) -> bool:
        """Whether there is a guess at its next token."""
        return self.expected is not None and self.num_seen == len(self.sequence.output_token_ids)


class Speculation:
    """Asks a drafter for drafts of the sequences for which they pay.

    Attributes:
      drafter: Makes the guesses.
      lengths: Chooses how many.
      counts: What became of them.
      budget: What looking for guesses, and wrong ones, may cost.

    Args:
      drafter: Makes the guesses.
      lengths: Chooses how many.
      max_drafts: Most drafts of a sequence in a step.
      budget: See above; None: one that steps of any length fill.
    """

    def __init__(
        self, drafter: Drafter, lengths: DraftLengths, *, max_drafts: int, budget: DraftBudget | None = None
    ) -> None:
        self.drafter, self.lengths = drafter, lengths
        self.counts = DraftCounts()
        self.budget = budget or DraftBudget()
        self._max_drafts = max_drafts
        self._sequences: dict[SequenceId, _Drafting] = {}
        # Those that may get drafts: their last guess came true. Of others, guesses are only compared.
        self._trusted: dict[SequenceId, _Drafting] = {}
        self._num_new_tokens = 0

    def wants_newest_tokens(self, output: SchedulerOutput, num_running: int) -> bool:
        """Whether the next step is to have drafts, for which the newest tokens must be known.

        Args:
          output: The step whose tokens are to be taken in next.
          num_running: Sequences that run.
        """
        ready = self._ready()
        if not ready or not all(entry.samples for entry in output.scheduled):
            return False  # where a prompt is read in several steps, the next one computes no drafts
        started = time.thread_time()
        places = [each.place for each in ready if each.sequence.status is SequenceStatus.RUNNING]
        wants = bool(places) and any(self.lengths.choose(places, num_running) or ())
        if not wants:
            self._pay(time.thread_time() - started, num_running)
        return wants

    def prepare(self, num_running: int) -> None:
        """Has the programs compiled that a sequence's first drafts need.

        Args:
          num_running: Sequences that will run, it included.
        """
        self.lengths.prepare(DraftPlace(self._max_drafts), num_running)

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
        if not lengths:
            return {}
        wanted = ((each.sequence, length) for each, length in zip(drafting, lengths, strict=True))
        return propose_drafts(self.drafter.propose, wanted, sampling)

    def observe(self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]) -> None:
        """Learns that a step's tokens were taken in.

        Args:
          output: The step.
          new_token_ids: For each of its entries, as the scheduler's `update` got them.
        """
        started, is_blind = 0.0, self.budget.is_overdrawn
        self._num_new_tokens = 0
        for entry, token_ids in zip(output.scheduled, new_token_ids, strict=True):
            sequence = entry.sequence
            drafting = self._sequences.get(sequence.seq_id)
            self._num_new_tokens += len(token_ids)
            if drafting is None or drafting.sequence is not sequence:
                drafting = self._begin(sequence) if entry.samples else None
            if drafting is None:
                continue
            if entry.draft_token_ids:
                self._observe_drafts(drafting, entry, len(token_ids))
            if sequence.status.finished:
                self.forget(sequence)
            elif not is_blind and len(sequence.output_token_ids) >= drafting.next_look:
                started = started or time.thread_time()
                self._guess(drafting, was_computed=bool(entry.draft_token_ids))
        if started and output.num_decodes == len(output.scheduled):
            self._pay(time.thread_time() - started, output.num_decodes)

    def observe_time(self, output: SchedulerOutput, seconds: float) -> None:
        """Learns how long the step took whose tokens were taken in last."""
        num_sequences, num_tokens = len(output.scheduled), len(output.ranks) * output.num_tokens
        if output.num_decodes < num_sequences:
            if any(entry.num_tokens != entry.num_rows for entry in output.scheduled):
                return  # it has prefills
            self.budget.pay(
                -self.lengths.saving(num_sequences, num_tokens, self._num_new_tokens),
                self.lengths.estimate(num_sequences),
            )
        self.lengths.record(num_tokens, seconds)
        self.budget.earn(seconds)

    def _observe_drafts(self, drafting: _Drafting, entry: ScheduledSequence, num_new_tokens: int) -> None:
        num_seen, num_right = verified(entry, num_new_tokens)
        self.counts.add(entry.num_drafts, num_right)
        self.drafter.observe(drafting.sequence, entry.num_drafts, num_right)
        self._learn(drafting, num_seen, num_right)

    def _learn(self, drafting: _Drafting, num_guesses: int, num_right: int) -> None:
        """Takes in what became of guesses, computed or only compared."""
        drafting.place.observe(num_guesses, num_right)
        self._trust(drafting, is_trusted=num_right > 0)

    def _trust(self, drafting: _Drafting, *, is_trusted: bool) -> None:
        if is_trusted:
            self._trusted[drafting.sequence.seq_id] = drafting
        else:
            self._trusted.pop(drafting.sequence.seq_id, None)

    def _pay(self, seconds: float, num_running: int) -> None:
        self.budget.pay(seconds, self.lengths.estimate(num_running))

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept about a sequence, which has ended."""
        if self._sequences.pop(sequence.seq_id, None) is not None:
            self._trusted.pop(sequence.seq_id, None)
            self.drafter.forget(sequence)

    def reset(self) -> None:
        """Drops what is kept about every sequence."""
        for drafting in list(self._sequences.values()):
            self.forget(drafting.sequence)

    def _begin(self, sequence: Sequence) -> _Drafting | None:
        max_drafts = max_drafts_of(sequence, self._max_drafts)
        if max_drafts == 0 or sequence.status.finished:
            return None
        drafting = _Drafting(sequence, DraftPlace(max_drafts))
        self._sequences[sequence.seq_id] = drafting
        return drafting

    def _guess(self, drafting: _Drafting, *, was_computed: bool) -> None:
        """Compares a sequence's newest token with the guess at it, unless it was a draft, and guesses the next one."""
        output = drafting.sequence.output_token_ids
        if drafting.expected is not None and drafting.num_seen == len(output) - 1 and not was_computed:
            self._learn(drafting, 1, int(drafting.expected == output[-1]))
        [guess] = self.drafter.propose([DraftRequest(drafting.sequence, 1)])
        drafting.expected = guess[0] if guess else None
        drafting.num_seen = len(output)
        tokens_per_look = 1
        if guess:
            drafting.num_guessed = len(output)
        else:
            num_unguessed = len(output) - drafting.num_guessed
            tokens_per_look = min(max(num_unguessed // UNGUESSED_TOKENS_PER_LOOK, 1), MAX_TOKENS_PER_LOOK)
            if num_unguessed > MAX_UNGUESSED_TOKENS:
                self._trust(drafting, is_trusted=False)
        drafting.next_look = len(output) + tokens_per_look

    def _ready(self) -> list[_Drafting]:
        """The sequences that may get drafts in the next step."""
        if not self._trusted or self.budget.is_overdrawn:
            return []
        return [d for d in self._trusted.values() if d.has_guess]
