"""Drafts by layers on the devices: a checkpoint's layers that predict later tokens, EAGLE-3 heads, smaller models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence

import numpy as np

from jaxis.engine.drafting.speculation import Drafter, DraftRequest
from jaxis.engine.execution.draft_program import DraftedSequence, DraftKey, pack_drafting
from jaxis.engine.execution.runner import NewestStep, Runner
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.models.common.interfaces import block_size_of, draft_of


class DraftLayers(Drafter):
    """Drafts with the layers in `draft` of the runner's model.

    They read every token that the model computes, before the next step is dispatched: a token that is still in flight
    is taken from the devices. Drafts follow from the newest step's hidden states, unless the step read prompts.

    Args:
      runner: Runner of the model.
      num_drafts: Most tokens to draft for a sequence.
      extend: The scheduler's `BlockManager.extend`.
    """

    takes_time = True

    def __init__(self, runner: Runner, num_drafts: int, extend: Callable[[Sequence, int, int], bool]) -> None:
        self._runner, self._num_drafts, self._extend = runner, num_drafts, extend
        layers = draft_of(runner.model)
        self._reads_next_token = bool(layers.reads_next_token)
        self._num_places = max(num_drafts, block_size_of(layers))

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """Runs the layers on the newest step, and waits for the drafts if any are wanted."""
        step, self._runner.newest = self._runner.newest, None
        if step is None:
            return [()] * len(requests)
        scheduled = step.output.scheduled
        num_drafting, drafted = 0, {}
        if any(entry.num_tokens > entry.num_rows for entry in scheduled):
            # The step read prompts. The next one may decode as many sequences: its program is compiled now.
            self._runner.programs.precompile(self._key(self._runner.step_shape(len(scheduled)), len(scheduled)))
        else:
            num_drafting = len(scheduled)
            drafted = self._drafted(step, [sequence for sequence, _ in requests if self._has_room(sequence)])
        key = self._key(step.shape, num_drafting)
        length = max((limit for _, limit in requests), default=0) if drafted else 0
        packed = pack_drafting(key, self._read_ids(scheduled), list(drafted.values()), length)
        drafts = self._runner.programs.run(key, step.packed, packed)
        if not drafted:
            return [()] * len(requests)
        of_sequences = dict(zip(drafted, np.asarray(drafts).tolist(), strict=False))
        found = (of_sequences.get(sequence.seq_id, ())[:limit] for sequence, limit in requests)
        return [list(itertools.takewhile(lambda token_id: token_id >= 0, token_ids)) for token_ids in found]

    def programs(self, num_running: int, num_tokens: int) -> list[DraftKey]:
        shapes = self._runner.step_shape(num_running), self._runner.step_shape(num_tokens, num_tokens)
        return [self._key(shape, num_running) for shape in shapes]

    def _key(self, shape: StepShape, num_drafting: int) -> DraftKey:
        return DraftKey(shape, self._runner.padded(num_drafting) if num_drafting else 0, self._num_drafts)

    def _drafted(self, step: NewestStep, sequences: Iterable[Sequence]) -> dict[SequenceId, DraftedSequence]:
        wanted = {sequence.seq_id for sequence in sequences}
        found: dict[SequenceId, DraftedSequence] = {}
        first_row = 0
        for entry in step.output.scheduled:
            sequence, newest = entry.sequence, entry.sequence.num_tokens - 1
            if sequence.seq_id in wanted:
                row = first_row + newest - 1 - entry.start
                found[sequence.seq_id] = DraftedSequence(row, sequence.token_id(newest), newest, sequence.block_tables)
            first_row += entry.num_tokens
        return found

    def _read_ids(self, scheduled: Iterable[ScheduledSequence]) -> list[int]:
        """Returns the tokens that the layers read in the rows of the newest step, as `pack_drafting` takes them."""
        token_ids: list[int] = []
        for entry in scheduled:
            first, sequence = entry.start + self._reads_next_token, entry.sequence
            known = sequence.token_ids(first, min(first + entry.num_tokens, sequence.num_tokens))
            token_ids += known
            if (num_unknown := entry.num_tokens - len(known)) > 0:
                # The token after a wrong draft is not known. The layers' result there is overwritten later.
                row = self._runner.inflight_rows.get(sequence.seq_id)
                token_ids += [0] * num_unknown if row is None or num_unknown > 1 else [-1 - row]
        return token_ids

    def _has_room(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's blocks have places for the drafts' keys and values; extends them if needed."""
        # Places for all drafts, even where fewer are wanted. From position 0: no block of the newest step is freed.
        num_tokens = sequence.num_tokens + self._num_places
        return num_tokens <= self._runner.max_model_len and self._extend(sequence, 0, num_tokens)
