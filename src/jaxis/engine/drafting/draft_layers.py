"""Drafts by layers on the devices: those of the checkpoint that predict later tokens, EAGLE-3 heads, smaller models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import Any

import numpy as np

from jaxis.engine.drafting.drafter import DraftRequest
from jaxis.engine.execution.draft_program import DraftedSequence, DraftKey, pack_drafting
from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.sequence import Sequence, SequenceId


class DraftLayers:
    """Drafts with the layers in `draft` of the runner's model.

    They see every token that the model computes. So each step must be followed by a call of `propose`, once its tokens
    are known and before the next one is scheduled.

    Args:
      runner: Of the model.
      num_drafts: Tokens to draft for each sequence, whatever is asked for: a program has a fixed number.
      extend: See `BlockManager.extend`.
    """

    needs_match = False
    follows_steps = True

    def __init__(self, runner: Runner, num_drafts: int, extend: Callable[[Sequence, int, int], bool]) -> None:
        self._runner, self._num_drafts, self._extend = runner, num_drafts, extend
        self._reads_next_token = bool(_layers_of(runner).reads_next_token)

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """See `Drafter`. Runs the layers over the newest step, and waits for the drafts."""
        drafts = self._draft(request.sequence for request in requests)
        return [drafts.get(request.sequence.seq_id, ())[: request.limit] for request in requests]

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """See `Drafter`."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""

    def _draft(self, sequences: Iterable[Sequence]) -> dict[SequenceId, list[int]]:
        step, self._runner.undrafted = self._runner.undrafted, None
        if step is None:
            return {}
        wanted = {sequence.seq_id for sequence in sequences if self._has_room(sequence)}
        token_ids: list[int] = []
        drafted: dict[SequenceId, DraftedSequence] = {}
        for entry in step.output.scheduled:
            sequence, first_row = entry.sequence, len(token_ids)
            start = entry.start + self._reads_next_token
            # What follows a wrong draft is not known; what is computed there is overwritten.
            known = sequence.token_ids(start, min(start + entry.num_tokens, sequence.num_tokens))
            token_ids += known + [0] * (entry.num_tokens - len(known))
            newest = sequence.num_tokens - 1
            row = newest - 1 - entry.start
            if sequence.seq_id in wanted and 0 <= row < entry.num_tokens:
                drafted[sequence.seq_id] = DraftedSequence(
                    first_row + row, sequence.token_id(newest), newest, sequence.block_tables
                )
        key = DraftKey(step.shape, 0, 0)
        if drafted:
            key = DraftKey(step.shape, self._runner.padded(len(drafted)), self._num_drafts)
        packed = pack_drafting(key, token_ids, list(drafted.values()))
        drafts = self._runner.executor.draft(key, step.packed, packed)
        return dict(zip(drafted, np.asarray(drafts).tolist(), strict=False)) if drafted else {}

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the drafts' keys and values have places in the sequence's blocks, which may be made for them."""
        num_tokens = sequence.num_tokens + self._num_drafts
        # From position 0: nothing that the newest step saw is given back.
        return num_tokens <= self._runner.max_model_len and self._extend(sequence, 0, num_tokens)


def _layers_of(runner: Runner) -> Any:
    return getattr(runner.model, "draft", None)
