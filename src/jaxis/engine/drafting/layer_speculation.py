"""Which running sequences get drafts of layers, and how many: `Speculation` for drafters that compute on the devices.

Their guesses are always there, and each costs time. So what decides is what they have gained so far (`LayerLengths`).
A step for which none are wanted is dispatched ahead, as without speculation.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.draft_length import DraftPlace, TypicalChance
from jaxis.engine.drafting.layer_lengths import LayerLengths, MeasuredStep
from jaxis.engine.drafting.proposals import max_drafts_of, propose_drafts, verified
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus


class _Drafting(NamedTuple):
    """A sequence that may get drafts, and its chances."""

    sequence: Sequence
    place: DraftPlace


class LayerSpeculation:
    """What `Speculation` is, for layers.

    Attributes:
      drafter: Has the layers.
      lengths: Chooses how many tokens they draft.
      counts: What became of them.

    Args:
      drafter: Has the layers.
      lengths: Chooses how many tokens they draft.
      max_drafts: Most drafts of a sequence in a step.
    """

    def __init__(self, drafter: DraftLayers, lengths: LayerLengths, *, max_drafts: int) -> None:
        self.drafter, self.lengths = drafter, lengths
        self.counts = DraftCounts()
        self._max_drafts = max_drafts
        self._sequences: dict[SequenceId, _Drafting] = {}
        # Of sequences that take the most likely tokens, and of others, whose drafts are right less often.
        self._typical = {True: TypicalChance(), False: TypicalChance()}
        self._num_new_tokens = self._num_late_tokens = 0
        self._is_prefilling = False  # steps that read prompts compute no drafts

    def wants_newest_tokens(self, output: SchedulerOutput, num_running: int) -> bool:
        """See `Speculation`."""
        if not all(entry.samples for entry in output.scheduled):
            return False  # the next step goes on reading a prompt, and computes no drafts
        places = [each.place for each in self._sequences.values() if each.sequence.status is SequenceStatus.RUNNING]
        return bool(places) and any(self.lengths.choose(places, num_running))

    def prepare(self, num_running: int) -> None:
        """See `Speculation`: layers do not read predictions."""

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> dict[SequenceId, AbstractSequence[int]]:
        """See `Speculation`; to be called between any two steps."""
        drafting = [each for each in self._sequences.values() if each.sequence.is_known]
        if self._is_prefilling:
            drafting = []
        lengths = self.lengths.choose([each.place for each in drafting], num_running) if drafting else []
        wanted = ((each.sequence, length) for each, length in zip(drafting, lengths, strict=True))
        return propose_drafts(self.drafter.propose, wanted, sampling)

    def observe(self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]) -> None:
        """See `Speculation`."""
        self._num_new_tokens = 0
        is_decode = output.num_decodes == len(output.scheduled)
        self._is_prefilling = not is_decode and not all(entry.samples for entry in output.scheduled)
        for entry, token_ids in zip(output.scheduled, new_token_ids, strict=True):
            if entry.samples:
                self._num_new_tokens += len(token_ids)
                self._observe(entry, len(token_ids))

    def observe_time(self, output: SchedulerOutput, seconds: float) -> None:
        """See `Speculation`."""
        num_late = self.drafter.num_late_tokens - self._num_late_tokens
        self._num_late_tokens += num_late
        num_running = num_tokens = len(output.scheduled)
        length = 0
        if output.num_decodes < num_running:  # not as nearly every step
            if any(entry.num_tokens > entry.num_rows for entry in output.scheduled):
                self.lengths.interrupt()
                return
            num_tokens, length = output.num_tokens, max(entry.num_drafts for entry in output.scheduled)
        self.lengths.record(MeasuredStep(num_running, num_tokens, length, self._num_new_tokens, num_late, seconds))

    def forget(self, sequence: Sequence) -> None:
        """See `Speculation`."""
        self._sequences.pop(sequence.seq_id, None)

    def reset(self) -> None:
        """See `Speculation`."""
        self._sequences.clear()
        self._is_prefilling = False
        self.drafter.reset()

    def _observe(self, entry: ScheduledSequence, num_new_tokens: int) -> None:
        sequence = entry.sequence
        if sequence.status.finished:
            drafting = self._sequences.pop(sequence.seq_id, None)
        else:
            drafting = self._sequences.get(sequence.seq_id)
            if drafting is None or drafting.sequence is not sequence:
                self._begin(sequence)
        if drafting is not None and entry.num_drafts:
            num_seen, num_right = verified(entry, num_new_tokens)
            self.counts.add(entry.num_drafts, num_right)
            drafting.place.observe(num_seen, num_right)

    def _begin(self, sequence: Sequence) -> None:
        if max_drafts := max_drafts_of(sequence, self._max_drafts):
            place = DraftPlace(max_drafts, self._typical[sequence.sampling_params.greedy])
            self._sequences[sequence.seq_id] = _Drafting(sequence, place)
