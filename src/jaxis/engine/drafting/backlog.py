"""What the layers that draft have not seen yet: tokens of steps that no drafts were wanted after.

A step whose drafts would not pay is dispatched ahead as if there were no layers. Of its tokens, the hidden states are
kept, and the layers see them later, many at a time, at a fraction of the cost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxis.engine.execution.dispatched_step import UndraftedStep
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import NO_SLOT, BlockTable, Sequence, SequenceId
from jaxis.engine.scheduling.state_slots import StateStep

if TYPE_CHECKING:
    import jax

_NO_STATE = StateStep(*[NO_SLOT] * len(StateStep._fields))


@dataclass(slots=True, eq=False)
class FollowedSequence:
    """A sequence whose tokens the layers see.

    Attributes:
      sequence: The sequence.
      block_tables: Its blocks, also when it has let go of them; another list once it was preempted.
      first_step: The number of the first step that has computed into these blocks.
      num_seen: Leading tokens that the layers have seen, or will never see.
    """

    sequence: Sequence
    block_tables: list[BlockTable]
    first_step: int
    num_seen: int

    @property
    def num_known(self) -> int:
        """Leading tokens that the model has computed, and that are followed by a known one."""
        return self.sequence.num_tokens - 1

    @property
    def is_preempted(self) -> bool:
        """Whether its blocks may be others'."""
        return not self.sequence.status.finished and self.block_tables is not self.sequence.block_tables


class _KeptRow(NamedTuple):
    """Where the states of a token are: in this row of what a step has left, or so many rows before that one."""

    step: UndraftedStep
    row: int
    back: int

    def place(self, kind: int) -> tuple[jax.Array, int]:
        """The array, of hidden states for 0 and then of auxiliary ones, and the row in it."""
        states = self.step.states[kind]
        if self.back == 0:
            return states, self.row
        return self.step.states_before[kind], (self.back - 1) * len(states) + self.row


class UnseenTokens(NamedTuple):
    """Tokens of a sequence, one after the other, that the layers are to see.

    Attributes:
      followed: The sequence.
      start: The position of the first token.
      rows: Of each token.
    """

    followed: FollowedSequence
    start: int
    rows: list[_KeptRow]

    @property
    def seq_id(self) -> SequenceId:
        return self.followed.sequence.seq_id

    @property
    def stop(self) -> int:
        """The position after the last of the tokens."""
        return self.start + len(self.rows)

    def divided(self, num_rows: int) -> tuple[UnseenTokens, UnseenTokens]:
        """So many of the tokens, and those that follow."""
        first, others = self.rows[:num_rows], self.rows[num_rows:]
        return self._replace(rows=first), self._replace(start=self.start + len(first), rows=others)


class Backlog:
    """The newest steps, with the states that they left.

    Args:
      num_seen_again: The last tokens that the layers have seen of a sequence, which they see again with the next ones.

    Attributes:
      steps: Those of which tokens may be unseen, or seen again, by number.
      followed: The sequences that have run in any step and have not ended.
    """

    def __init__(self, num_seen_again: int = 0) -> None:
        self._num_seen_again = num_seen_again
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.steps: dict[int, UndraftedStep] = {}
        self.followed: dict[SequenceId, FollowedSequence] = {}
        self._num_steps = 0

    def add(self, step: UndraftedStep) -> None:
        """Adds the newest step, and begins to follow its sequences."""
        self._num_steps += 1
        self.steps[self._num_steps] = step
        for entry in step.output.scheduled:
            sequence = entry.sequence
            followed = self.followed.get(sequence.seq_id)
            is_known = followed is not None and followed.block_tables is sequence.block_tables
            if not is_known and not sequence.status.finished:
                self.followed[sequence.seq_id] = FollowedSequence(
                    sequence, sequence.block_tables, self._num_steps, entry.start
                )

    def drop_seen(self) -> None:
        """Drops the steps of which all tokens are seen."""
        self.steps = {number: step for number, step in self.steps.items() if not self._is_seen(number, step)}

    def _is_seen(self, number: int, step: UndraftedStep) -> bool:
        for entry in step.output.scheduled:
            each = self.followed.get(entry.sequence.seq_id)
            if each is not None and each.first_step <= number and not each.is_preempted:
                num_to_see = each.sequence.num_tokens_with_inflight - 1
                if each.num_seen - self._num_seen_again < min(entry.start + entry.num_tokens, num_to_see):
                    return False
        return True

    def take_ended(self) -> list[FollowedSequence]:
        """The sequences that have ended since the last call, no longer followed."""
        ended = [each for each in self.followed.values() if each.sequence.status.finished]
        for each in ended:
            del self.followed[each.sequence.seq_id]
        return ended

    def unseen(self, sequences: Iterable[FollowedSequence]) -> list[UnseenTokens]:
        """All known tokens of these sequences that the layers have not seen and whose states are kept.

        Before them come those that the layers see again, as far as their states are kept.
        """
        found = {
            each.sequence.seq_id: UnseenTokens(each, max(each.num_seen - self._num_seen_again, 0), [])
            for each in sequences
            if not each.is_preempted
        }
        for number, step in self.steps.items():
            first_row = 0
            for entry in step.output.scheduled:
                each = found.get(entry.sequence.seq_id)
                if each is not None and each.followed.sequence is entry.sequence and number >= each.followed.first_step:
                    found[entry.sequence.seq_id] = self._with_rows(each, entry, step, first_row)
                first_row += entry.num_rows
        known = (each.divided(max(each.followed.num_known - each.start, 0))[0] for each in found.values())
        return [each for each in known if each.stop > each.followed.num_seen]

    def _with_rows(
        self, unseen: UnseenTokens, entry: ScheduledSequence, step: UndraftedStep, first_row: int
    ) -> UnseenTokens:
        """Adds the rows that a step has left of a sequence to those of its unseen tokens."""
        stop = entry.start + entry.num_tokens
        sampled = stop - entry.num_rows
        start = max(sampled - self._num_seen_again, entry.start)
        if start > unseen.stop:
            if start > unseen.followed.num_seen:
                return unseen  # some before them are gone
            unseen = unseen._replace(start=start, rows=[])
        # A step may compute again what earlier ones have, as after a wrong draft.
        del unseen.rows[max(start - unseen.start, 0) :]
        unseen.rows.extend(
            _KeptRow(step, first_row + max(position - sampled, 0), max(sampled - position, 0))
            for position in range(max(start, unseen.start), stop)
        )
        return unseen


def step_over(unseen: list[UnseenTokens]) -> SchedulerOutput:
    """A step of these tokens, those of single ones first."""
    entries = []
    for each in unseen:
        sequence = copy.copy(each.followed.sequence)
        sequence.block_tables = each.followed.block_tables
        entries.append(ScheduledSequence(sequence, each.start, len(each.rows), samples=False, state=_NO_STATE))
    num_decodes = sum(entry.num_tokens == 1 for entry in entries)
    return SchedulerOutput(tuple(entries), num_decodes, ())


def states_of(unseen: list[UnseenTokens], num_padded: int) -> list[np.ndarray]:
    """The states of the tokens of `step_over`, each [num_padded, E]; waits for the steps that they are of."""
    rows = [row for each in unseen for row in each.rows]
    states = []
    for kind, first in enumerate(rows[0].step.states):
        places = [row.place(kind) for row in rows]
        arrays = {id(array): np.asarray(array) for array in {id(array): array for array, _ in places}.values()}
        joined = np.zeros((num_padded, *first.shape[1:]), first.dtype)
        for i, (array, row) in enumerate(places):
            joined[i] = arrays[id(array)][row]
        states.append(joined)
    return states


def in_parts(unseen: list[UnseenTokens], max_tokens: int, max_sequences: int) -> Iterator[list[UnseenTokens]]:
    """Parts of at most so many tokens and sequences, those of single tokens first.

    Each is to be seen before the next one is asked for.
    """
    part: list[UnseenTokens] = []
    room = max_tokens
    for tokens in unseen:
        while tokens.rows:
            if room == 0 or len(part) == max_sequences:
                yield single_tokens_first(part)
                part, room = [], max_tokens
            taken, tokens = tokens.divided(room)
            part.append(taken)
            room -= len(taken.rows)
    if part:
        yield single_tokens_first(part)


def single_tokens_first(unseen: list[UnseenTokens]) -> list[UnseenTokens]:
    """In the order in which `step_over` has them."""
    return sorted(unseen, key=lambda tokens: len(tokens.rows) > 1)
