"""Speculative decoding in the engine: chooses which running sequences get drafts of their next tokens, and how many.

A draft costs a row of a step, and a step with drafts cannot be dispatched before the previous one was read. So
sequences get drafts only where these are expected to pay (`DraftChooser`). Answers do not depend on drafts: a draft
counts only if the model samples the same token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxis.engine.drafting.chooser import DraftChooser, Guessed, UsualChance
from jaxis.engine.execution.draft_program import DraftKey
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.engine.speculation import DraftCounts, NoSpeculation
from jaxis.sampling_params import SamplingParams


class DraftRequest(NamedTuple):
    """A sequence whose next tokens a drafter should guess.

    Attributes:
      sequence: The sequence; it has no token in flight.
      limit: Most tokens to guess, at least 1.
    """

    sequence: Sequence
    limit: int


class Drafter(Protocol):
    """Guesses tokens; wrong guesses cannot change an answer.

    Attributes:
      takes_time: True if the devices make the guesses, one after the other. Otherwise a guess costs so little that one
        is made after every token, and compared with the next.
    """

    takes_time: bool = False

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """Returns at most `limit` guesses for each request, from the next token on; an empty sequence if it has none.

        The engine calls it between any two steps, even without requests, so the drafter sees every step.
        """
        ...

    def programs(self, num_running: int, num_tokens: int) -> AbstractSequence[DraftKey]:  # noqa: ARG002
        """Keys of the programs that draft for so many sequences, in steps of so many tokens with the drafts."""
        return ()

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Records that the first `num_right` of a sequence's `num_drafts` drafts in a step were right."""

    def forget(self, sequence: Sequence) -> None:
        """Drops the drafter's data of a sequence, which has ended."""


@dataclass(eq=False)
class _Drafting:
    """Drafting state of one sequence.

    Attributes:
      sequence: The sequence.
      guessed: Record of how often guesses at its tokens were right.
      is_trusted: True if the sequence may get drafts: its last guess was right, or the drafter makes no guess to
        compare.
      guess: Guess at the next token, made while the output has `num_seen` tokens; None if there is none.
      num_seen: Length of the output when the last guess was looked for.
    """

    sequence: Sequence
    guessed: Guessed
    is_trusted: bool
    guess: int | None = None
    num_seen: int = 0


class Speculation(NoSpeculation):
    """Asks a drafter for drafts of the sequences for which they are expected to pay.

    Args:
      drafter: Maker of the guesses.
      chooser: Chooser of their numbers.
      max_drafts: Most drafts of a sequence in a step.
      read_prediction: Function that returns the tokens of a request's prediction; by default, none is read.
    """

    counts: DraftCounts

    def __init__(
        self,
        drafter: Drafter,
        chooser: DraftChooser,
        *,
        max_drafts: int,
        read_prediction: Callable[[SamplingParams], list[int]] = lambda _: [],
    ) -> None:
        self.drafter, self.chooser, self._read_prediction = drafter, chooser, read_prediction
        self.counts = DraftCounts()
        self._max_drafts = max_drafts
        self._sequences: dict[SequenceId, _Drafting] = {}
        self._ready: dict[SequenceId, _Drafting] = {}  # the sequences that may get drafts now
        # One average for greedy sequences and one for sampled ones, whose guesses are right less often.
        self._usual = {True: UsualChance(), False: UsualChance()}
        self._num_new_tokens = 0

    def wants_newest_tokens(self, output: SchedulerOutput, num_running: int) -> bool:
        if not self._ready or not all(entry.samples for entry in output.scheduled):
            return False  # a prompt in several chunks: the next step computes no drafts
        guessed = [each.guessed for each in self._ready.values() if each.sequence.status is SequenceStatus.RUNNING]
        return bool(guessed) and any(self.chooser.choose(guessed, num_running))

    def begin(self, sequences: AbstractSequence[Sequence], num_running: int) -> None:
        """Reads the prediction, and compiles the programs for the first drafts beside `num_running` sequences."""
        if sequences[0].sampling_params.prediction:
            token_ids = self._read_prediction(sequences[0].sampling_params)
            for sequence in sequences:
                sequence.prediction_token_ids = token_ids
            self.chooser.prepare(Guessed(self._max_drafts), num_running + 1)

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> Mapping[SequenceId, AbstractSequence[int]]:
        """Returns drafts of sequences without a token in flight."""
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
        num_running, length = len(output.scheduled), 0
        if output.num_decodes < num_running:  # rare
            if any(entry.num_tokens != entry.num_rows for entry in output.scheduled):
                return  # the step has prefills
            length = max(entry.num_drafts for entry in output.scheduled)
        num_tokens = len(output.ranks) * output.num_tokens
        self.chooser.record(num_running, num_tokens, length, self._num_new_tokens, seconds)

    def forget(self, sequence: Sequence) -> None:
        drafting = self._sequences.get(sequence.seq_id)
        if drafting is not None and drafting.sequence is sequence:
            del self._sequences[sequence.seq_id]
            self._ready.pop(sequence.seq_id, None)
            self.drafter.forget(sequence)

    def reset(self) -> None:
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
        # Drafts after the end of the sequence were not compared.
        self._learn(drafting, num_right if drafting.sequence.status.finished else entry.num_drafts, num_right)

    def _learn(self, drafting: _Drafting, num_guesses: int, num_right: int) -> None:
        drafting.guessed.observe(num_guesses, num_right)
        drafting.is_trusted = num_right > 0 or self.drafter.takes_time

    def _guess(self, drafting: _Drafting, *, was_drafted: bool) -> None:
        """Compares a sequence's newest token with its guess, unless it was a draft, and guesses the next one."""
        output = drafting.sequence.output_token_ids
        if drafting.guess is not None and drafting.num_seen == len(output) - 1 and not was_drafted:
            self._learn(drafting, 1, int(drafting.guess == output[-1]))
        [guess] = self.drafter.propose([DraftRequest(drafting.sequence, 1)])
        drafting.guess, drafting.num_seen = (guess[0] if guess else None), len(output)
        if guess and drafting.is_trusted:
            self._ready[drafting.sequence.seq_id] = drafting
        else:
            self._ready.pop(drafting.sequence.seq_id, None)
