"""Drafts by layers on the devices: those of the checkpoint that predict later tokens, EAGLE-3 heads, smaller models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.drafting.backlog import (
    Backlog,
    FollowedSequence,
    UnseenTokens,
    in_parts,
    single_tokens_first,
    states_of,
    step_over,
)
from jaxis.engine.drafting.drafter import DraftRequest
from jaxis.engine.execution.dispatched_step import UndraftedStep
from jaxis.engine.execution.draft_program import DraftedSequence, DraftKey, pack_drafting
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.step_inputs import StepShape, pack_step
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.models.common.interfaces import draft_of

if TYPE_CHECKING:
    import jax

# After so many steps without drafts, or about so many tokens, the layers are to see them.
MAX_UNSEEN_STEPS, MAX_UNSEEN_TOKENS = 64, 2048
# What tokens that are seen late are padded to, so that few programs have to be compiled.
_LATE_SIZES = (8, 64)


class DraftLayers:
    """Drafts with the layers in `draft` of the runner's model.

    They see every token that the model computes: those of prompts at once, others when drafts are wanted, or when there
    are many. So each step must be followed by a call of `propose` before the next one is scheduled.

    Args:
      runner: Of the model.
      num_drafts: Most tokens to draft for a sequence.
      extend: See `BlockManager.extend`.

    Attributes:
      may_catch_up: Whether the layers may see so many tokens now, for which nobody waits. If not, they never do, and
        drafts that follow these tokens are worse. Always, unless replaced.
      num_late_tokens: Tokens that the layers saw late, since the start.
    """

    def __init__(self, runner: Runner, num_drafts: int, extend: Callable[[Sequence, int, int], bool]) -> None:
        self._runner, self._num_drafts, self._extend = runner, num_drafts, extend
        self._limits = runner.vllm_config.scheduler_config
        self._backlog = Backlog(runner.executor.num_seen_again)
        self._chain_length = 1 + runner.executor.num_seen_again
        self._reads_next_token = bool(draft_of(runner.model).reads_next_token)
        self.may_catch_up: Callable[[int], bool] = bool
        self.num_late_tokens = 0

    def propose(self, requests: AbstractSequence[DraftRequest]) -> list[AbstractSequence[int]]:
        """See `Drafter`. Waits for the drafts, if any are asked for."""
        backlog = self._backlog
        step, self._runner.undrafted = self._runner.undrafted, None
        if step is not None:
            backlog.add(step)
            others = step.output.scheduled[step.output.num_decodes :]
            if any(map(_reads_prompt, others)):
                self._see_prompts(step)
        if ended := backlog.take_ended():
            # From the next step on, their blocks may be others'.
            self._catch_up(backlog.unseen(ended))
            backlog.drop_seen()
        if requests:
            drafts = self._draft(requests, step)
            return [drafts.get(request.sequence.seq_id, ())[: request.limit] for request in requests]
        num_steps = len(backlog.steps)
        if step is not None and (
            num_steps > MAX_UNSEEN_STEPS or num_steps * len(step.output.scheduled) > MAX_UNSEEN_TOKENS
        ):
            self._catch_up(backlog.unseen(backlog.followed.values()))
            backlog.drop_seen()
        return []

    def reset(self) -> None:
        """Forgets all steps: there are new caches."""
        self._backlog.clear()

    def programs(self, num_sequences: int, num_tokens: int) -> list[DraftKey]:
        """What is needed to draft for so many sequences, in steps of so many tokens with their drafts."""
        shapes = {self._runner.step_shape(min(num_sequences, self._most_drafting) * self._num_last_rows)}
        if self._chain_length == 1:
            shapes.add(self._runner.step_shape(num_tokens, num_tokens))
        num_drafting = min(num_sequences, self._most_drafting)
        return [*(self._key(shape, num_drafting) for shape in shapes), *self._late_programs()]

    def _see_prompts(self, step: UndraftedStep) -> None:
        """Takes the layers over the newest step, of which more tokens are known than have their states kept."""
        entries = self._followed_entries(step)
        behind = [each for entry, each in entries if _reads_prompt(entry) and each.num_seen < entry.start]
        self._catch_up(self._backlog.unseen(behind), is_due=True)
        self._see_step(step)
        for entry, each in entries:
            if each.num_seen >= entry.start:
                # Drafts follow from the last token, when they are wanted: its states are kept, as those of drafts.
                num_seen = entry.start + entry.num_tokens - (entry.num_rows if entry.samples else 0)
                each.num_seen = max(each.num_seen, min(num_seen, each.num_known))

    def _see_step(
        self, step: UndraftedStep, drafted: AbstractSequence[DraftedSequence] = (), length: int | None = None
    ) -> jax.Array:
        """Takes the layers over the step that was dispatched last; returns the drafts behind it."""
        key = self._key(step.shape, len(drafted))
        token_ids = self._read_ids(step.output.scheduled, step.shape)
        return self._runner.executor.draft(key, step.packed, pack_drafting(key, token_ids, drafted, length))

    def _catch_up(self, unseen: Iterable[UnseenTokens], *, is_due: bool = False) -> None:
        """Takes the layers over these tokens, if it is due or may be."""
        unseen = [each for each in unseen if each.rows]
        num_tokens = sum(len(each.rows) for each in unseen)
        if num_tokens and not is_due:
            is_ready = self._runner.is_compiled(*self._late_programs())
            if not is_ready or not self.may_catch_up(num_tokens):
                for each in unseen:
                    each.followed.num_seen = each.stop
                return
        most = min(_LATE_SIZES[-1], self._limits.max_num_batched_tokens)
        for part in in_parts(unseen, most, self._limits.max_num_seqs):
            self._see_late(part, self._late_shape(sum(len(each.rows) for each in part)))

    def _late_programs(self) -> list[DraftKey]:
        return [self._key(shape, 0) for shape in {self._late_shape(size) for size in _LATE_SIZES}]

    def _see_late(
        self,
        part: list[UnseenTokens],
        shape: StepShape,
        drafted: AbstractSequence[DraftedSequence] = (),
        length: int | None = None,
    ) -> jax.Array:
        """Takes the layers over these tokens of earlier steps; returns the drafts behind them."""
        key = self._key(shape, len(drafted))
        output = step_over(part)
        packed = pack_drafting(key, self._read_ids(output.scheduled, shape), drafted, length)
        states = states_of(part, shape.num_tokens)
        drafts = self._runner.executor.draft(key, pack_step(output, shape, {}), packed, states)
        for each in part:
            each.followed.num_seen = max(each.followed.num_seen, each.stop)
        self.num_late_tokens += output.num_tokens
        return drafts

    def _draft(self, requests: Iterable[DraftRequest], newest: UndraftedStep | None) -> dict[SequenceId, list[int]]:
        """Takes the layers over all that they have not seen, and drafts; waits for the drafts."""
        backlog = self._backlog
        lengths = {
            sequence.seq_id: limit
            for sequence, limit in requests
            if sequence.seq_id in backlog.followed and self._has_room(sequence)
        }
        length = max(lengths.values(), default=1)
        is_at_once = newest is not None and self._is_all_unseen(newest)
        if newest is not None and is_at_once and len(backlog.steps) == self._chain_length == 1:
            drafted = self._drafted_in(newest, lengths)
            drafts = np.asarray(self._see_step(newest, list(drafted.values()), length))
            for _, each in self._followed_entries(newest):
                each.num_seen = each.num_known
            backlog.steps.clear()
            return _by_sequence(drafted, drafts, length)
        num_late_tokens = self.num_late_tokens
        # Drafts follow from a sequence's last known tokens, so those before them are to be seen first.
        earlier, last = [], []
        for each in backlog.unseen(backlog.followed.values()):
            if each.seq_id in lengths and each.stop == each.followed.num_known:
                each, its_last = each.divided(max(len(each.rows) - self._num_last_rows, 0))
                last.append(its_last)
            earlier.append(each)
        self._catch_up(earlier, is_due=True)
        found: dict[SequenceId, list[int]] = {}
        for begin in range(0, len(last), self._most_drafting):
            found |= self._draft_behind(last[begin : begin + self._most_drafting], length)
        if is_at_once:
            self.num_late_tokens = num_late_tokens  # seen again, but no later than they could be
        backlog.drop_seen()
        return found

    @property
    def _num_last_rows(self) -> int:
        """The last tokens of a sequence that one program sees and drafts behind: of a chain, those of two steps."""
        if self._chain_length == 1:
            return 1
        return min(self._chain_length + self._num_drafts, self._limits.max_num_batched_tokens)

    @property
    def _most_drafting(self) -> int:
        """Most sequences that one program drafts for from such tokens."""
        return max(1, self._limits.max_num_batched_tokens // self._num_last_rows)

    def _draft_behind(self, last: list[UnseenTokens], length: int) -> dict[SequenceId, list[int]]:
        """Takes the layers over these tokens, the last ones that are known, and drafts what follows each sequence."""
        last = single_tokens_first(last)
        rows = itertools.accumulate(len(each.rows) for each in last)
        drafted = {
            each.seq_id: self._drafted_sequence(each.followed.sequence, row - 1)
            for each, row in zip(last, rows, strict=True)
        }
        shape = self._runner.step_shape(len(last) * self._num_last_rows)
        drafts = np.asarray(self._see_late(last, shape, list(drafted.values()), length))
        return _by_sequence(drafted, drafts, length)

    def _is_all_unseen(self, step: UndraftedStep) -> bool:
        """Whether the layers have seen just what came before the newest step, of which all tokens are known."""
        return all(
            each.num_seen == entry.start and entry.start < each.num_known <= entry.start + entry.num_tokens
            for entry, each in self._followed_entries(step)
        )

    def _drafted_in(self, step: UndraftedStep, wanted: dict[SequenceId, int]) -> dict[SequenceId, DraftedSequence]:
        """Those of the sequences that are in the step."""
        found: dict[SequenceId, DraftedSequence] = {}
        first_row = 0
        for entry in step.output.scheduled:
            if entry.sequence.seq_id in wanted:
                row = first_row + entry.sequence.num_tokens - 2 - entry.start
                found[entry.sequence.seq_id] = self._drafted_sequence(entry.sequence, row)
            first_row += entry.num_tokens
        return found

    def _drafted_sequence(self, sequence: Sequence, row: int) -> DraftedSequence:
        newest = sequence.num_tokens - 1
        return DraftedSequence(row, sequence.token_id(newest), newest, sequence.block_tables)

    def _followed_entries(self, step: UndraftedStep) -> list[tuple[ScheduledSequence, FollowedSequence]]:
        """The step's entries of sequences that have not ended."""
        followed = self._backlog.followed
        return [(entry, each) for entry in step.output.scheduled if (each := followed.get(entry.sequence.seq_id))]

    def _read_ids(self, entries: Iterable[ScheduledSequence], shape: StepShape) -> list[int]:
        """What the layers read in the rows of a step; 0 where it is not known. Of a chain, T for each layer."""
        token_ids = []
        for layer in range(self._chain_length):
            begin = len(token_ids)
            for entry in entries:
                first, sequence = entry.start + self._reads_next_token + layer, entry.sequence
                # What follows a wrong draft is not known; what is computed there is overwritten.
                known = sequence.token_ids(first, min(first + entry.num_tokens, sequence.num_tokens))
                token_ids += known + [0] * (entry.num_tokens - len(known))
            token_ids += [0] * (begin + shape.num_tokens - len(token_ids))
        return token_ids

    def _key(self, shape: StepShape, num_drafting: int) -> DraftKey:
        if num_drafting == 0:
            return DraftKey(shape, 0, 0, self._chain_length)
        return DraftKey(shape, self._runner.padded(num_drafting), self._num_drafts, self._chain_length)

    def _late_shape(self, num_tokens: int) -> StepShape:
        size = next(size for size in _LATE_SIZES if num_tokens <= size)
        return self._runner.step_shape(min(size, self._limits.max_num_batched_tokens))

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the drafts' keys and values have places in the sequence's blocks, which may be made for them."""
        # Of all drafts, also where fewer are wanted: a block is written whole.
        num_tokens = sequence.num_tokens + self._num_drafts
        # From position 0: nothing that the newest step saw is given back.
        return num_tokens <= self._runner.max_model_len and self._extend(sequence, 0, num_tokens)


def _reads_prompt(entry: ScheduledSequence) -> bool:
    return not entry.samples or entry.num_tokens > entry.num_rows


def _by_sequence(drafted: Iterable[SequenceId], drafts: np.ndarray, length: int) -> dict[SequenceId, list[int]]:
    return dict(zip(drafted, drafts[:, :length].tolist(), strict=False))
