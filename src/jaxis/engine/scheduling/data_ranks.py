"""A scheduler of several data ranks in step: each has a scheduler and blocks of its own, and each sequence one rank.

A sequence is given to a rank when that rank can begin to compute it in the next step, not before. By then the ranks
know what is in their prefix caches, and none has a line of waiting sequences while another is idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import PromptSpan, Sequence, SequenceId, SequenceStatus
from jaxis.engine.scheduling.waiting_queue import WaitingQueue
from jaxis.errors import RequestError

# Weight of one more sequence on a rank, in prompt tokens that are computed again on another rank. Every rank waits for
# the rank with most sequences. Without this weight, all sequences with a common prefix would go to the one rank that
# has the prefix.
TOKENS_OF_A_SEQUENCE = 64
# Number of tokens copied from the store that weigh as much as one computed token.
LOADED_TOKENS_OF_A_TOKEN = 16


@dataclass(frozen=True, slots=True)
class DataRanksOutput(SchedulerOutput):
    """One step of several data ranks, whose sequences it lists rank by rank.

    Attributes:
      parts: Each rank's own step, without sequences if the rank has nothing to do.
    """

    parts: tuple[SchedulerOutput, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[SchedulerOutput]) -> DataRanksOutput:
        parts = tuple(parts)
        return cls(
            scheduled=tuple(itertools.chain.from_iterable(part.scheduled for part in parts)),
            num_decodes=sum(part.num_decodes for part in parts),
            preempted=tuple(itertools.chain.from_iterable(part.preempted for part in parts)),
            parts=parts,
        )

    @property
    def num_tokens(self) -> int:
        """The tokens of the rank that computes most; the other ranks' tokens are padded to as many."""
        return max(part.num_tokens for part in self.parts)

    @property
    def num_rows(self) -> int:
        """The tokens of the rank that samples most; the other ranks' tokens are padded to as many."""
        return max(part.num_rows for part in self.parts)

    @property
    def has_drafts(self) -> bool:
        return any(part.has_drafts for part in self.parts)

    @property
    def ranks(self) -> tuple[SchedulerOutput, ...]:
        return self.parts


IDLE = SchedulerOutput((), 0, ())
"""The part of a rank with nothing to do."""


class DataRanksScheduler:
    """The schedulers of all data ranks, with the methods of one `Scheduler`.

    Args:
      ranks: The scheduler of each rank.
      shares: Account of the tokens that each client was served by all ranks.
    """

    takes_tokens_in_flight = True

    def __init__(self, ranks: Iterable[Scheduler], shares: FairShares) -> None:
        self.ranks = tuple(ranks)
        self.block_manager = DataRanksBlocks([rank.block_manager for rank in self.ranks])
        self._unassigned: dict[SequenceId, Sequence] = {}
        self._waiting = WaitingQueue(shares)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unassigned) or any(rank.has_unfinished for rank in self.ranks)

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        return len(self._unassigned) + sum(rank.num_waiting for rank in self.ranks)

    @property
    def awaited_spans(self) -> list[PromptSpan]:
        return [span for rank in self.ranks for span in rank.awaited_spans]

    def add_sequence(self, sequence: Sequence) -> None:
        if sequence.seq_id in self._unassigned or any(sequence.seq_id in rank for rank in self.ranks):
            request_id = sequence.seq_id.request_id
            raise RequestError(f"request {request_id!r} already exists: wait for it, abort it, or choose another id")
        self.ranks[0].check(sequence)
        self._unassigned[sequence.seq_id] = sequence
        self._waiting.push(sequence)

    def abort_sequence(self, seq_id: SequenceId) -> Sequence | None:
        return self.finish_sequence(seq_id, SequenceStatus.FINISHED_ABORTED)

    def finish_sequence(
        self, seq_id: SequenceId, status: SequenceStatus, stop_reason: int | str | None = None
    ) -> Sequence | None:
        if (sequence := self._unassigned.pop(seq_id, None)) is not None:
            sequence.status, sequence.stop_reason = status, stop_reason
            return sequence
        ended = (rank.finish_sequence(seq_id, status, stop_reason) for rank in self.ranks)
        return next((sequence for sequence in ended if sequence is not None), None)

    def schedule(self, drafts: Mapping[SequenceId, Many[int]] | None = None) -> DataRanksOutput | None:
        """Builds the next step of all ranks; None when none of them can run anything."""
        if self._unassigned:
            self._assign()
        outputs = [rank.schedule(drafts) for rank in self.ranks]
        if all(output is None for output in outputs):
            return None
        return DataRanksOutput.of(
            output or SchedulerOutput((), 0, (), rank.block_manager.connector.take_moves())
            for rank, output in zip(self.ranks, outputs, strict=True)
        )

    def update(self, output: SchedulerOutput, new_token_ids: Many[Many[int]]) -> Iterator[tuple[Sequence, int, int]]:
        start = 0
        for rank, part in zip(self.ranks, output.ranks, strict=True):
            stop = start + len(part.scheduled)
            yield from rank.update(part, new_token_ids[start:stop])
            start = stop

    def recompute_all(self) -> None:
        for sequence in self._unassigned.values():
            sequence.block_digests.clear()
        for rank in self.ranks:
            rank.recompute_all()

    def on_first_rank(self, output: SchedulerOutput) -> DataRanksOutput:
        """Returns a step of the first rank alone."""
        return DataRanksOutput.of([output, *[IDLE] * (len(self.ranks) - 1)])

    def _assign(self) -> None:
        """Gives waiting sequences, in order, to ranks that can begin them in the next step."""
        capacities = [_RankCapacity(rank) for rank in self.ranks]
        chosen, request_id = None, None
        while (sequence := self._waiting.head()) is not None:
            # All sequences of a request share its prompt and go to one rank. They are neighbours in the queue.
            if chosen is None or sequence.seq_id.request_id != request_id:
                if not any(capacity.is_open for capacity in capacities):
                    return
                # A rank whose step is full may still be the best, if it knows a long prefix.
                costs = {each.cost(sequence): each for each in reversed(capacities) if each.has_place}
                chosen, request_id = costs[min(costs)], sequence.seq_id.request_id
            self._waiting.pop(sequence)
            del self._unassigned[sequence.seq_id]
            chosen.take(sequence)


class _RankCapacity:
    """The sequences and tokens that a rank can begin in the next step."""

    def __init__(self, rank: Scheduler) -> None:
        self.rank = rank
        self._num_places = 0 if rank.num_waiting else rank.max_num_seqs - rank.num_running
        self._num_sequences = rank.num_running + rank.num_waiting
        self._num_tokens = 0  # to be computed
        if self._num_places:
            self._num_tokens = rank.num_pending_tokens

    @property
    def has_place(self) -> bool:
        """True if one more sequence may run."""
        return self._num_places > 0

    @property
    def is_open(self) -> bool:
        """True if one more sequence can begin in the next step."""
        return self.has_place and self._num_tokens < self.rank.max_num_batched_tokens

    def cost(self, sequence: Sequence) -> tuple[bool, int]:
        """Orders ranks for a sequence: first those with blocks for it, then by the work that the rank would have."""
        num_uncached, num_loaded = self._missing(sequence)
        lacks_blocks = not self.rank.block_manager.has_room_for(num_uncached + num_loaded)
        num_tokens = num_uncached + num_loaded // LOADED_TOKENS_OF_A_TOKEN + self._num_tokens
        return lacks_blocks, num_tokens + TOKENS_OF_A_SEQUENCE * self._num_sequences

    def take(self, sequence: Sequence) -> None:
        self._num_tokens += self._missing(sequence)[0]
        self._num_places -= 1
        self._num_sequences += 1
        self.rank.add_sequence(sequence)

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """Returns the tokens that the rank would have to compute and those that it would have to load."""
        blocks = self.rank.block_manager
        prefix = blocks.get_cached_prefix(sequence)
        num_loaded_blocks = len({index for _, index in prefix.stored})
        return sequence.num_tokens - prefix.num_blocks * blocks.block_size, num_loaded_blocks * blocks.block_size


class DataRanksBlocks:
    """The blocks of all data ranks, counted together; see `BlockManager`."""

    def __init__(self, ranks: Many[BlockManager]) -> None:
        self.ranks = ranks
        self.block_size, self.search = ranks[0].block_size, ranks[0].search

    @property
    def num_blocks(self) -> int:
        return sum(rank.num_blocks for rank in self.ranks)

    @property
    def num_free_blocks(self) -> int:
        return sum(rank.num_free_blocks for rank in self.ranks)

    @property
    def usage(self) -> float:
        """The mean of the ranks' `BlockManager.usage`."""
        return sum(rank.usage for rank in self.ranks) / len(self.ranks)

    @property
    def prefix_cache_queries(self) -> int:
        return sum(rank.prefix_cache_queries for rank in self.ranks)

    @property
    def prefix_cache_hits(self) -> int:
        return sum(rank.prefix_cache_hits for rank in self.ranks)

    def is_known(self, group: int, digest: bytes) -> bool:
        """Returns whether a block, or a state, is known on every rank. Other threads may call this."""
        return all(rank.is_known(group, digest) for rank in self.ranks)

    def forget_prefix(self, sequence: Sequence) -> None:
        for rank in self.ranks:
            rank.forget_prefix(sequence)

    def reset_prefix_cache(self) -> None:
        for rank in self.ranks:
            rank.reset_prefix_cache()

    @property
    def weights(self) -> bytes:
        return self.ranks[0].weights

    def set_weights(self, weights: bytes) -> None:
        for rank in self.ranks:
            rank.set_weights(weights)


def add_all(scheduler: Scheduler | DataRanksScheduler, sequences: Many[Sequence]) -> None:
    """Queues all sequences of a request, or none.

    Raises:
      RequestError: `Scheduler.add_sequence` refuses one of them.
    """
    for number, sequence in enumerate(sequences):
        try:
            scheduler.add_sequence(sequence)
        except RequestError:
            for added in sequences[:number]:
                scheduler.abort_sequence(added.seq_id)
            raise
