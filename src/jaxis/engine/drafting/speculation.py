"""Speculative decoding, the engine's side: which running sequences get drafts of their next tokens, and how many.

A draft costs a row of a step, and a step with drafts cannot be dispatched before the one ahead of it was read. So there
are drafts where they are expected to pay (`DraftChooser`). Answers never depend on any of this: a draft counts only if
the model samples that token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxis.engine.drafting.chooser import DraftChooser, Guessed, UsualChance
from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.execution.draft_program import DraftKey
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus


class DraftRequest(NamedTuple):
    """A sequence whose next tokens are to be guessed.

    Attributes:
      sequence: All its tokens are known: none is in flight.
      limit: Most tokens to guess, at least 1.
    """

    sequence: Sequence
    limit: int


class Drafter(Protocol):
    """Guesses tokens; wrong ones cannot change an answer.

    Attributes:
      takes_time: Whether the devices make its guesses, one after the other. If not, a guess at the next token costs so
        little that one is made and compared after every token.
    """

    takes_time: bool = False

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """At most `limit` guesses for each request, from the next token on; empty where it has none.

        It is called between any two steps, also without requests: so it sees each step as it runs.
        """
        ...

    def programs(self, num_running: int, num_tokens: int) -> AbstractSequence[DraftKey]:  # noqa: ARG002
        """What the devices need to draft for so many sequences, in steps of so many tokens with their drafts."""
        return ()

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Learns how many of the guesses that a step computed for a sequence were right, counted from the first."""

    def forget(self, sequence: Sequence) -> None:
        """Drops what it keeps about a sequence, which has ended."""


class NoSpeculation:
    """What the engine asks about drafts, answered where nothing drafts.

    Attributes:
      counts: What became of drafts; None: none are made.
      reads_predictions: Whether a request's `prediction` is read.
    """

    counts: DraftCounts | None = None
    reads_predictions = False

    def wants_newest_tokens(self, output: SchedulerOutput, num_running: int) -> bool:
        """Whether the next step is to have drafts, for which the newest tokens must be known.

        Args:
          output: The step whose tokens are to be taken in next.
          num_running: Sequences that run.
        """
        del output, num_running
        return False

    def prepare(self, num_running: int) -> None:
        """Has the programs compiled that a sequence's first drafts need.

        Args:
          num_running: Sequences that will run, it included.
        """

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> Mapping[SequenceId, AbstractSequence[int]]:
        """Drafts for the next step, by sequence; to be called before each step is scheduled.

        Args:
          sampling: Each unfinished sequence's sampling state.
          num_running: Sequences that run.
        """
        del sampling, num_running
        return {}

    def observe(self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]) -> None:
        """Learns that a step's tokens were taken in.

        Args:
          output: The step.
          new_token_ids: For each of its entries, as the scheduler's `update` got them.
        """

    def observe_time(self, output: SchedulerOutput, seconds: float) -> None:
        """Learns how long the step took whose tokens were taken in last."""

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept about a sequence, which has ended."""

    def reset(self) -> None:
        """Drops what is kept about every sequence."""


@dataclass(eq=False)
class _Drafting:
    """How drafting goes for one sequence.

    Attributes:
      sequence: The sequence.
      guessed: How often guesses at its tokens were right.
      is_trusted: Whether it may get drafts: its last guess came true, or none can be compared without drafts.
      guess: The guess at the next token of the output while it has `num_seen` tokens.
      num_seen: Tokens that its output had when a guess was looked for.
    """

    sequence: Sequence
    guessed: Guessed
    is_trusted: bool
    guess: int | None = None
    num_seen: int = 0


class Speculation(NoSpeculation):
    """Asks a drafter for drafts of the sequences for which they pay.

    Attributes:
      drafter: Makes the guesses.
      chooser: Chooses how many.
      counts: What became of them.

    Args:
      drafter: Makes the guesses.
      chooser: Chooses how many.
      max_drafts: Most drafts of a sequence in a step.
    """

    counts: DraftCounts
    reads_predictions = True

    def __init__(self, drafter: Drafter, chooser: DraftChooser, *, max_drafts: int) -> None:
        self.drafter, self.chooser = drafter, chooser
        self.counts = DraftCounts()
        self._max_drafts = max_drafts
        self._sequences: dict[SequenceId, _Drafting] = {}
        self._ready: dict[SequenceId, _Drafting] = {}  # those of them that may get drafts now
        # Of sequences that take the most likely tokens, and of others, of which guesses are right less often.
        self._usual = {True: UsualChance(), False: UsualChance()}
        self._num_new_tokens = 0

    def wants_newest_tokens(self, output: SchedulerOutput, num_running: int) -> bool:
        """See `NoSpeculation`."""
        if not self._ready or not all(entry.samples for entry in output.scheduled):
            return False  # where a prompt is read in several steps, the next one computes no drafts
        guessed = [each.guessed for each in self._ready.values() if each.sequence.status is SequenceStatus.RUNNING]
        return bool(guessed) and any(self.chooser.choose(guessed, num_running))

    def prepare(self, num_running: int) -> None:
        """See `NoSpeculation`."""
        self.chooser.prepare(Guessed(self._max_drafts), num_running)

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> Mapping[SequenceId, AbstractSequence[int]]:
        """See `NoSpeculation`; of sequences with a token in flight there are none."""
        known = [
            each
            for each in self._ready.values()
            if each.sequence.is_known and each.sequence.status is SequenceStatus.RUNNING
        ]
        lengths = self.chooser.choose([each.guessed for each in known], num_running) if known else []
        requests = []
        for each, length in zip(known, lengths, strict=True):
            room = each.sequence.max_total_tokens - each.sequence.num_tokens - 1
            if (limit := min(length, room)) > 0:
                requests.append(DraftRequest(each.sequence, limit))
        drafts: dict[SequenceId, AbstractSequence[int]] = {}
        for (sequence, limit), token_ids in zip(requests, self.drafter.propose(requests), strict=True):
            if token_ids := sampling[sequence.seq_id].allowed_drafts(token_ids[:limit]):
                drafts[sequence.seq_id] = token_ids
        return drafts

    def observe(self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]) -> None:
        """See `NoSpeculation`."""
        self._num_new_tokens = 0
        is_looking = not self.drafter.takes_time and not self.chooser.is_overdrawn
        started = time.thread_time() if is_looking else 0.0
        for entry, token_ids in zip(output.scheduled, new_token_ids, strict=True):
            if not entry.samples:
                continue
            sequence = entry.sequence
            self._num_new_tokens += len(token_ids)
            drafting = self._sequences.get(sequence.seq_id)
            if drafting is None or drafting.sequence is not sequence:
                drafting = self._begin(sequence)
                if drafting is None:
                    continue
            if entry.num_drafts or self.drafter.takes_time:
                self._observe_drafts(drafting, entry, len(token_ids))
            if sequence.status.finished:
                self.forget(sequence)
            elif is_looking:
                self._guess(drafting, was_drafted=entry.num_drafts > 0)
            elif not self.drafter.takes_time:
                self._ready.pop(sequence.seq_id, None)
        if is_looking and output.num_decodes == len(output.scheduled):
            self.chooser.pay(time.thread_time() - started)

    def observe_time(self, output: SchedulerOutput, seconds: float) -> None:
        """See `NoSpeculation`."""
        num_running, length = len(output.scheduled), 0
        if output.num_decodes < num_running:  # not as nearly every step
            if any(entry.num_tokens != entry.num_rows for entry in output.scheduled):
                return  # it has prefills
            length = max(entry.num_drafts for entry in output.scheduled)
        num_tokens = len(output.ranks) * output.num_tokens
        self.chooser.record(num_running, num_tokens, length, self._num_new_tokens, seconds)

    def forget(self, sequence: Sequence) -> None:
        """See `NoSpeculation`."""
        drafting = self._sequences.get(sequence.seq_id)
        if drafting is not None and drafting.sequence is sequence:
            del self._sequences[sequence.seq_id]
            self._ready.pop(sequence.seq_id, None)
            self.drafter.forget(sequence)

    def reset(self) -> None:
        """See `NoSpeculation`."""
        for drafting in list(self._sequences.values()):
            self.forget(drafting.sequence)

    def _begin(self, sequence: Sequence) -> _Drafting | None:
        wanted = sequence.sampling_params.num_speculative_tokens
        max_drafts = self._max_drafts if wanted is None else min(wanted, self._max_drafts)
        if max_drafts == 0 or sequence.status.finished:
            return None
        guessed = Guessed(max_drafts, self._usual[sequence.sampling_params.greedy])
        drafting = self._sequences[sequence.seq_id] = _Drafting(sequence, guessed, self.drafter.takes_time)
        if drafting.is_trusted:
            self._ready[sequence.seq_id] = drafting
        return drafting

    def _observe_drafts(self, drafting: _Drafting, entry: ScheduledSequence, num_new_tokens: int) -> None:
        num_right = max(num_new_tokens - 1, 0)
        if entry.num_drafts:
            self.counts.add(entry.num_drafts, num_right)
            drafting.sequence.num_drafts += entry.num_drafts
            drafting.sequence.num_accepted_drafts += num_right
            self.drafter.observe(drafting.sequence, entry.num_drafts, num_right)
        # Drafts behind an end were not looked at.
        self._learn(drafting, num_right if drafting.sequence.status.finished else entry.num_drafts, num_right)

    def _learn(self, drafting: _Drafting, num_guesses: int, num_right: int) -> None:
        """Takes in what became of guesses, drafted or only compared."""
        drafting.guessed.observe(num_guesses, num_right)
        drafting.is_trusted = num_right > 0 or self.drafter.takes_time

    def _guess(self, drafting: _Drafting, *, was_drafted: bool) -> None:
        """Compares a sequence's newest token with the guess at it, unless it was a draft, and guesses the next one."""
        output = drafting.sequence.output_token_ids
        if drafting.guess is not None and drafting.num_seen == len(output) - 1 and not was_drafted:
            self._learn(drafting, 1, int(drafting.guess == output[-1]))
        [guess] = self.drafter.propose([DraftRequest(drafting.sequence, 1)])
        drafting.guess, drafting.num_seen = (guess[0] if guess else None), len(output)
        if guess and drafting.is_trusted:
            self._ready[drafting.sequence.seq_id] = drafting
        else:
            self._ready.pop(drafting.sequence.seq_id, None)
