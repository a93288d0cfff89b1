"""What the layers that draft have not seen yet: tokens of steps that no drafts were wanted after.

A step whose drafts would not pay is dispatched ahead as if there were no layers. Of its tokens, the hidden states are
kept, and the layers see them later, many at a time, at a fraction of the cost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxis.engine.execution.dispatched_step import UndraftedStep
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import NO_SLOT, BlockTable, Sequence, SequenceId
from jaxis.engine.scheduling.state_slots import StateStep

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
    """Where the states of a token are: in this row of what a step has left."""

    step: UndraftedStep
    row: int


class UnseenTokens(NamedTuple):
    """Tokens of a sequence, one after the other, that the layers are to see.

    Attributes:
      followed: The sequence.
      rows: Of each token.
    """

    followed: FollowedSequence
    rows: list[_KeptRow]

    @property
    def seq_id(self) -> SequenceId:
        return self.followed.sequence.seq_id

    @property
    def stop(self) -> int:
        """The position after the last of the tokens."""
        return self.followed.num_seen + len(self.rows)


class Backlog:
    """The newest steps, with the states that they left.

    Attributes:
      steps: Those of which tokens may be unseen, by number.
      followed: The sequences that have run in any step and have not ended.
    """

    def __init__(self) -> None:
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
                if each.num_seen < min(entry.start + entry.num_tokens, num_to_see):
                    return False
        return True

    def take_ended(self) -> list[FollowedSequence]:
        """The sequences that have ended since the last call, no longer followed."""
        ended = [each for each in self.followed.values() if each.sequence.status.finished]
        for each in ended:
            del self.followed[each.sequence.seq_id]
        return ended

    def unseen(self, sequences: Iterable[FollowedSequence]) -> list[UnseenTokens]:
        """All known tokens of these sequences that the layers have not seen and whose states are kept."""
        followed = {each.sequence.seq_id: each for each in sequences if not each.is_preempted}
        rows: dict[SequenceId, list[_KeptRow]] = {seq_id: [] for seq_id in followed}
        for number, step in self.steps.items():
            first_row = 0
            for entry in step.output.scheduled:
                each = followed.get(entry.sequence.seq_id)
                if each is not None and each.sequence is entry.sequence and number >= each.first_step:
                    _put(rows[entry.sequence.seq_id], each.num_seen, entry, _KeptRow(step, first_row))
                first_row += entry.num_rows
        return [
            UnseenTokens(each, known)
            for seq_id, each in followed.items()
            if (known := rows[seq_id][: max(each.num_known - each.num_seen, 0)])
        ]


def _put(rows: list[_KeptRow], num_seen: int, entry: ScheduledSequence, first: _KeptRow) -> None:
    """Adds the rows that a step has left of a sequence to those of its unseen tokens."""
    start = entry.start + entry.num_tokens - entry.num_rows
    if start > num_seen + len(rows):
        return  # some before them are gone
    # A step may compute again what earlier ones have, as after a wrong draft.
    del rows[max(start - num_seen, 0) :]
    skipped = max(num_seen - start, 0)
    rows.extend(_KeptRow(first.step, first.row + row) for row in range(skipped, entry.num_rows))


def step_over(unseen: list[UnseenTokens]) -> SchedulerOutput:
    """A step of these tokens, those of single ones first."""
    entries = []
    for each in unseen:
        sequence = copy.copy(each.followed.sequence)
        sequence.block_tables = each.followed.block_tables
        entries.append(
            ScheduledSequence(sequence, each.followed.num_seen, len(each.rows), samples=False, state=_NO_STATE)
        )
    num_decodes = sum(entry.num_tokens == 1 for entry in entries)
    return SchedulerOutput(tuple(entries), num_decodes, ())


def states_of(unseen: list[UnseenTokens], num_padded: int) -> list[np.ndarray]:
    """The states of the tokens of `step_over`, each [num_padded, E]; waits for the steps that they are of."""
    rows = [row for each in unseen for row in each.rows]
    states = []
    for kind in range(len(rows[0].step.states)):
        arrays = {id(row.step): np.asarray(row.step.states[kind]) for row in rows}
        array = next(iter(arrays.values()))
        joined = np.zeros((num_padded, *array.shape[1:]), array.dtype)
        for place, row in enumerate(rows):
            joined[place] = arrays[id(row.step)][row.row]
        states.append(joined)
    return states


def in_parts(unseen: list[UnseenTokens], max_tokens: int, max_sequences: int) -> Iterator[list[UnseenTokens]]:
    """Parts of at most so many tokens and sequences, those of single tokens first.

    Each is to be seen before the next one is asked for.
    """
    part: list[UnseenTokens] = []
    room = max_tokens
    for followed, rows in unseen:
        while rows:
            if room == 0 or len(part) == max_sequences:
                yield _single_tokens_first(part)
                part, room = [], max_tokens
            part.append(UnseenTokens(followed, rows[:room]))
            rows = rows[room:]
            room -= len(part[-1].rows)
    if part:
        yield _single_tokens_first(part)


def _single_tokens_first(unseen: list[UnseenTokens]) -> list[UnseenTokens]:
    return sorted(unseen, key=lambda tokens: len(tokens.rows) > 1)
