"""Choice of the sequences and tokens of the next step: continuous batching with chunked prefill.

The engine's loop is `schedule()`, run the step, `update()`. It may run ahead: call `schedule()` for the next step while
the one before is still being computed, so that the device never waits for the host. Devices run steps in the order in
which they were dispatched. Beyond that, running ahead needs the following of the engine:

- every output of `schedule()` is dispatched at once, before any other call, and gets its `update()`, in order;
- a decode whose input token the host does not know yet takes it from the device, where the step before left it;
- nothing is scheduled ahead for a sequence whose step computes drafts, which are guesses at its next tokens: the number
  of right drafts is known only when the step has been computed;
- `schedule()` may return None because everything depends on tokens in flight; after the `update()` there is work again.

Blocks that are given back while a dispatched step still reads or writes them may go to another sequence, even in the
very next step, because the device runs that step later. Within a step, no sequence gives back blocks that its own
tokens in that step see.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from operator import attrgetter

from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.fair_shares import FairShares, StepCapacity
from jaxis.engine.scheduling.places import NO_PLACES, Places
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import PromptSpan, Sequence, SequenceId, SequenceStatus
from jaxis.engine.scheduling.waiting_queue import WaitingQueue
from jaxis.errors import ConfigError, RequestError


class Scheduler:
    """Serves sequences by priority, then by the turn of their client (see `FairShares`), then by arrival.

    Each running decode gets its token. Prefills share the rest of the token budget. Waiting sequences are admitted,
    strictly in order, while fewer than `max_num_seqs` run and there is budget, the place that they need, and blocks
    for all their tokens (see `BlockManager.admit`); among equals, running sequences come first.

    If a decode needs a block and none is free, the running sequence of the lowest priority, and among those the one
    that arrived last, is preempted (`Sequence.service_order`): it gives up its blocks, waits its turn, and recomputes
    (or finds its blocks in the prefix cache). A sequence of a client that runs more than its share is also preempted,
    if another client's sequence cannot start because `max_num_seqs` run or blocks are too few.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_stages: int = 1,
        shares: FairShares | None = None,
        places: Places = NO_PLACES,
        is_ready: Callable[[PromptSpan], bool] = lambda _: True,
    ) -> None:
        """Raises ConfigError if the sizes contradict each other.

        Args:
          block_manager: The KV cache's blocks.
          max_num_seqs: Most sequences running at a time (R).
          max_num_batched_tokens: The token budget of a step (T).
          max_model_len: Most tokens of a sequence, prompt and output together.
          num_stages: Steps to keep in flight at once. If more than one, steps in flight have different sequences, each
            step takes its share of the decodes, and no sequence is scheduled while it has a token in flight.
          shares: Turns of clients, if several schedulers share them.
          places: Places for sequences that need one to run.
          is_ready: Function that returns whether a span can be computed now. While it cannot, other sequences go on.
        """
        if max_num_seqs < 1 or max_model_len < 1:
            raise ConfigError(f"max_num_seqs={max_num_seqs} and max_model_len={max_model_len} must be at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than max_num_seqs={max_num_seqs}, so not "
                "every running sequence could decode in a step: raise the one or lower the other"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._num_stages = num_stages
        self._unfinished: dict[SequenceId, Sequence] = {}
        self._shares = shares or FairShares()
        self._places = places
        self._places.begin()
        self._is_ready = is_ready
        self._waiting = WaitingQueue(self._shares)
        # In service order. Victims are taken from the end while decodes are scheduled from the front, and prefills
        # preempt no sequence; so a sequence scheduled in this step is never preempted in it.
        self._running: list[Sequence] = []
        self._preempted_ids: list[SequenceId] = []
        self._awaited: dict[bytes, PromptSpan] = {}  # by digest

    @property
    def awaited_spans(self) -> list[PromptSpan]:
        """The spans that kept sequences out of the newest step, in the order in which they are needed."""
        return list(self._awaited.values())

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of sequences not admitted yet, and of preempted ones."""
        return len(self._unfinished) - len(self._running)

    @property
    def num_pending_tokens(self) -> int:
        """The tokens that running sequences still have to compute before they sample."""
        return sum(sequence.num_tokens_with_inflight - sequence.num_computed_tokens for sequence in self._running)

    @property
    def takes_tokens_in_flight(self) -> bool:
        """True if a sequence may be scheduled while its newest token is in flight."""
        return self._num_stages == 1

    @property
    def ranks(self) -> tuple[Scheduler, ...]:
        """The scheduler of each data rank; here this one alone, see `DataRanksScheduler`."""
        return (self,)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._unfinished

    def add_sequence(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
          RequestError: Its id is in use, or `check` refuses it.
        """
        if sequence.seq_id in self._unfinished:
            request_id = sequence.seq_id.request_id
            raise RequestError(f"request {request_id!r} already exists: wait for it, abort it, or choose another id")
        self.check(sequence)
        self._unfinished[sequence.seq_id] = sequence
        self._places.join(sequence.place)
        self._waiting.push(sequence)

    def check(self, sequence: Sequence) -> None:
        """Raises a RequestError for a sequence that could never run.

        Its prompt is empty or leaves no token to generate, or it could outgrow the KV cache.
        """
        if sequence.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty: give at least one token")
        # The last token is sampled and returned, but never computed: a prompt may fill the context.
        fills_context = sequence.num_prompt_tokens == self.max_model_len
        if sequence.max_total_tokens > self.max_model_len + fills_context:
            raise RequestError(
                f"the request may grow to {sequence.max_total_tokens} tokens, more than "
                f"max_model_len={self.max_model_len}: shorten its prompt or lower max_tokens"
            )
        if sequence.num_tokens >= sequence.max_total_tokens:
            raise RequestError(
                f"the prompt has {sequence.num_tokens} tokens, which leaves none to generate of at most "
                f"{sequence.max_total_tokens} in all (max_model_len={self.max_model_len}): shorten it"
            )
        shortage = self.block_manager.shortage(sequence.max_total_tokens - 1, self.max_num_batched_tokens)
        if shortage is not None:
            num_needed, num_blocks = shortage
            raise RequestError(
                f"the request may need {num_needed} KV cache blocks of {self.block_manager.block_size} tokens, and "
                f"there are {num_blocks}: shorten its prompt, lower max_tokens, or enlarge the cache"
            )

    def abort_sequence(self, seq_id: SequenceId) -> Sequence | None:
        """Ends a sequence at once; its tokens in flight are dropped. Returns it, or None if none has this id."""
        return self.finish_sequence(seq_id, SequenceStatus.FINISHED_ABORTED)

    def finish_sequence(
        self, seq_id: SequenceId, status: SequenceStatus, stop_reason: int | str | None = None
    ) -> Sequence | None:
        """Ends a sequence for a reason found outside, such as a stop string; its tokens in flight are dropped.

        Returns None if no unfinished sequence has this id (it may just have ended by itself).
        """
        if not status.finished:
            raise ValueError(f"{status} does not finish a sequence")
        sequence = self._unfinished.get(seq_id)
        if sequence is not None:
            self._finish(sequence, status, stop_reason)
        return sequence

    def schedule(self, drafts: Mapping[SequenceId, AbstractSequence[int]] | None = None) -> SchedulerOutput | None:
        """Builds the next step, and counts its tokens as computed, except drafts.

        Returns None when nothing can run: no sequence is left, or all wait for tokens in flight.

        Args:
          drafts: Guesses at the tokens that follow the known ones, by sequence. As many of a sequence's drafts are
            computed as budget and free blocks allow; none in a step with prefills, where each row costs its full
            arithmetic.
        """
        self.block_manager.begin_step()
        self._awaited.clear()
        decodes: list[ScheduledSequence] = []
        replays: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        self._preempt_for_other_client()
        num_preempted_before = len(self._preempted_ids)
        prefilling = self._schedule_decodes(decodes)
        # A step that preempts is short of blocks: the blocks that it freed are for the running sequences.
        may_admit = len(self._preempted_ids) == num_preempted_before
        lacks_blocks = False
        budget = self.max_num_batched_tokens - len(decodes)
        capacity = StepCapacity(self.max_num_batched_tokens, (entry.sequence for entry in decodes))
        while budget > 0:
            sequence = min(prefilling, key=self._waiting.order, default=None)
            admitted = self._admit_before(sequence, budget, capacity) if may_admit else None
            if admitted is not None:
                entries = decodes if _is_decode(admitted) else prefills
                end = self._chunk_end(admitted, admitted.num_computed_tokens, capacity.of(admitted, budget))
                budget -= self._schedule_tokens(admitted, end, entries, capacity)
            elif sequence is None:
                break
            else:
                prefilling.remove(sequence)
                end = self._chunk_end(sequence, sequence.num_computed_tokens, capacity.of(sequence, budget))
                if end == sequence.num_computed_tokens:
                    continue
                # In layers with a window, a prefill gets blocks chunk by chunk. It may have to wait for others.
                if self.block_manager.allocate(sequence, end):
                    is_replay = sequence.num_computed_tokens >= sequence.num_prompt_tokens
                    budget -= self._schedule_tokens(sequence, end, replays if is_replay else prefills, capacity)
                else:
                    may_admit, lacks_blocks = False, True
        if lacks_blocks and not decodes and not replays and not prefills and not self._has_inflight_tokens():
            # Prefills of several clients hold the blocks that each of them needs to go on.
            self._preempt(self._running.pop())
            return self.schedule(drafts)
        if not decodes and not replays and not prefills:
            return None
        drafted = self._add_drafts(decodes, replays, drafts) if drafts and not prefills else []
        prefills[:0] = replays
        moves = self.block_manager.connector.take_moves()
        # Registered before the step has run: blocks are found, and saved by the connector, in a later step.
        for entry in prefills:
            self.block_manager.cache_full_blocks(entry.sequence)
        preempted, self._preempted_ids = tuple(self._preempted_ids), []
        scheduled = (*decodes, *drafted, *prefills)
        return SchedulerOutput(scheduled, len(decodes), preempted, moves)

    def on_first_rank(self, output: SchedulerOutput) -> SchedulerOutput:
        """Returns the step itself; see `DataRanksScheduler`."""
        return output

    def update(
        self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]
    ) -> Iterator[tuple[Sequence, int, int]]:
        """Adds a step's tokens to their sequences; must be called once for every step, in order, and exhausted.

        Args:
          output: The step.
          new_token_ids: For each entry of `output.scheduled`, the tokens that extend its sequence (see
            `ScheduledSequence.accepted`); ignored if the entry does not sample.

        Yields:
          Each unfinished sequence's new tokens one by one, as soon as they are part of its output: the sequence, the
          token, and its index in the entry's list. A token that ends a sequence is among them; the sequence's status
          tells. A sequence that the caller finishes meanwhile gets no further tokens.
        """
        for entry, token_ids in zip(output.scheduled, new_token_ids, strict=True):
            if not entry.samples:
                continue
            sequence = entry.sequence
            sequence.num_inflight_tokens -= 1
            sequence.num_inflight_drafts = 0
            if entry.num_drafts and sequence.status is SequenceStatus.RUNNING:
                # Every token but the first follows a right draft, whose keys and values are the sequence's.
                num_right = max(len(token_ids) - 1, 0)
                sequence.num_computed_tokens = self.block_manager.settle(sequence, entry.known_stop + num_right)
            for index, token_id in enumerate(token_ids):
                if sequence.status.finished:
                    break
                sequence.output_token_ids.append(token_id)
                self.block_manager.cache_full_blocks(sequence)
                ending = sequence.ending()
                if ending is not None:
                    self._finish(sequence, *ending)
                yield sequence, token_id, index

    def _schedule_decodes(self, decodes: list[ScheduledSequence]) -> list[Sequence]:
        """Schedules the running sequences' decodes; returns the running sequences that are still in their prefill."""
        prefilling: list[Sequence] = []
        most_decodes = -(-len(self._running) // self._num_stages)
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            if sequence.num_inflight_drafts or (sequence.num_inflight_tokens and not self.takes_tokens_in_flight):
                continue
            start, stop = sequence.num_computed_tokens, sequence.num_tokens_with_inflight
            if start + 1 != stop or start < sequence.num_prompt_tokens:
                prefilling.append(sequence)
            elif len(decodes) == most_decodes:
                continue
            # If no other token may be sampled, the sequence ends with the token in flight.
            elif stop < sequence.max_total_tokens and self._allocate_or_preempt(sequence):
                state = self.block_manager.state_step(sequence, start, stop)
                decodes.append(ScheduledSequence(sequence, start, 1, True, state))
                sequence.num_computed_tokens = stop
                sequence.num_inflight_tokens += 1
        return prefilling

    def _add_drafts(
        self,
        decodes: list[ScheduledSequence],
        replays: list[ScheduledSequence],
        drafts: Mapping[SequenceId, AbstractSequence[int]],
    ) -> list[ScheduledSequence]:
        """Takes the entries that get drafts out of the lists; returns them with their drafts."""
        budget = self.max_num_batched_tokens - sum(entry.num_tokens for entry in (*decodes, *replays))
        drafted: list[ScheduledSequence] = []
        for entries in (decodes, replays):
            plain: list[ScheduledSequence] = []
            for entry in entries:
                draft_token_ids = drafts.get(entry.sequence.seq_id, ())[:budget]
                with_drafts = self._with_drafts(entry, draft_token_ids) if draft_token_ids else None
                if with_drafts is None:
                    plain.append(entry)
                else:
                    drafted.append(with_drafts)
                    budget -= with_drafts.num_drafts
            entries[:] = plain
        return drafted

    def _with_drafts(
        self, entry: ScheduledSequence, draft_token_ids: AbstractSequence[int]
    ) -> ScheduledSequence | None:
        """Returns the entry with as many drafts as it can get without preempting; None if it gets none."""
        sequence, known_stop = entry.sequence, entry.known_stop
        if sequence.num_tokens != known_stop:  # drafts follow the last known token
            return None
        # The step also samples a token behind the last draft, which counts against the limit of tokens.
        num_drafts = min(len(draft_token_ids), sequence.max_total_tokens - known_stop - 1)
        while num_drafts > 0:
            stop = known_stop + num_drafts
            fits, state = self.block_manager.add_drafts(sequence, entry.state, entry.start, known_stop, stop)
            if fits:
                sequence.num_inflight_drafts = num_drafts
                return entry._replace(
                    num_tokens=stop - entry.start, state=state, draft_token_ids=tuple(draft_token_ids[:num_drafts])
                )
            num_drafts -= 1
        return None

    def _allocate_or_preempt(self, sequence: Sequence) -> bool:
        """Allocates for the running sequence's next token; returns False if the sequence itself was preempted."""
        while not self.block_manager.allocate(sequence, sequence.num_computed_tokens + 1):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt_for_other_client(self) -> None:
        """Preempts a sequence of a client with more than its share, if another client's next sequence cannot start."""
        waiting = self._next_waiting()
        if waiting is None or waiting.num_inflight_tokens > 0:
            return
        if len(self._running) < self.max_num_seqs and self.block_manager.has_room_for(waiting.num_tokens):
            return
        if any(
            sequence.client == waiting.client and sequence.num_computed_tokens < sequence.num_prompt_tokens
            for sequence in self._running
        ):
            return  # the running prefill already has this client's part of the step
        num_running = Counter(sequence.client for sequence in self._running)
        most = num_running[waiting.client] + 1  # the waiting client's number once its sequence runs
        for index in reversed(range(len(self._running))):
            sequence = self._running[index]
            if num_running[sequence.client] > most and sequence.priority >= waiting.priority:
                self._preempt(self._running.pop(index))
                return

    def _next_waiting(self) -> Sequence | None:
        """Returns the sequence to admit next.

        A sequence that gets no place is passed only by sequences that need none. Otherwise it would never get a place
        while newer sequences take those that become free.
        """
        sequence = self._waiting.head()
        if sequence is None or self._places.has_place(sequence.place):
            return sequence
        return self._waiting.head(without_place=True)

    def _admit_before(self, running: Sequence | None, budget: int, capacity: StepCapacity) -> Sequence | None:
        """Admits the next waiting sequence if it is to be served before `running`.

        Returns None if it is not its turn, or if it lacks a place or blocks.
        """
        if len(self._running) >= self.max_num_seqs:
            return None
        sequence = self._next_waiting()
        # A preempted sequence with a token in flight cannot be computed anew before the host knows that token.
        if sequence is None or sequence.num_inflight_tokens > 0:
            return None
        if self._running and sequence.seq_id in self._preempted_ids:
            return None  # preempted in this step
        if running is not None and self._waiting.order(running)[:2] <= self._waiting.order(sequence)[:2]:
            return None
        budget = capacity.of(sequence, budget)
        if budget == 0:
            return None
        blocks = self.block_manager
        prefix = blocks.get_cached_prefix(sequence)
        start = prefix.num_blocks * blocks.block_size
        if self._chunk_end(sequence, start, budget) == start:
            return None
        num_tokens = min(sequence.num_tokens, start + budget)
        if not blocks.admit(sequence, prefix, num_tokens, self.max_num_batched_tokens):
            return None
        self._places.take(sequence.place)
        self._waiting.pop(sequence)
        bisect.insort(self._running, sequence, key=attrgetter("service_order"))
        sequence.status = SequenceStatus.RUNNING
        return sequence

    def _has_inflight_tokens(self) -> bool:
        return any(sequence.num_inflight_tokens for sequence in self._unfinished.values())

    def _schedule_tokens(
        self, sequence: Sequence, stop: int, scheduled: list[ScheduledSequence], capacity: StepCapacity
    ) -> int:
        start = sequence.num_computed_tokens
        samples = stop == sequence.num_tokens_with_inflight
        state = self.block_manager.state_step(sequence, start, stop)
        self._shares.serve(sequence.client, stop - start)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = time.monotonic()
        scheduled.append(ScheduledSequence(sequence, start, stop - start, samples, state))
        sequence.num_computed_tokens = stop
        sequence.num_inflight_tokens += samples
        capacity.add(sequence, stop - start, samples=samples)
        return stop - start

    def recompute_all(self) -> None:
        """Preempts every sequence, so that all tokens are computed anew; no token may be in flight."""
        while self._running:
            self._preempt(self._running.pop())
        self._preempted_ids.clear()  # nothing took their blocks
        for sequence in self._unfinished.values():
            sequence.block_digests.clear()

    def _chunk_end(self, sequence: Sequence, start: int, budget: int) -> int:
        """Returns the end of a step's tokens of a sequence, at most `start` + `budget`; `start` if it has to wait."""
        stop = min(sequence.num_tokens_with_inflight, start + budget)
        if sequence.state is not None and start < sequence.state.cut < stop:
            stop = sequence.state.cut
        has_others = len(self._running) > (sequence.status is SequenceStatus.RUNNING)
        for span in sequence.spans:
            # Tokens that see each other are computed in one step. Other sequences do not wait for a span.
            is_cut = span.is_bidirectional and span.start < stop < span.stop
            waits = has_others and span.start < stop and start < span.stop and not self._is_ready(span)
            if waits:
                self._awaited.setdefault(span.digest, span)
            if is_cut or waits:
                return max(span.start, start)
        return stop

    def _preempt(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence)
        self._places.give_back(sequence.place)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._preempted_ids.append(sequence.seq_id)
        self._waiting.push(sequence)

    def _finish(self, sequence: Sequence, status: SequenceStatus, stop_reason: int | str | None) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._places.give_back(sequence.place)
        sequence.status = status
        sequence.stop_reason = stop_reason
        self.block_manager.free(sequence)
        del self._unfinished[sequence.seq_id]
        self._places.leave(sequence.place)


def _is_decode(sequence: Sequence) -> bool:
    """Returns whether just one token, which was sampled, is left to compute."""
    num_computed_tokens = sequence.num_computed_tokens
    return (
        num_computed_tokens >= sequence.num_prompt_tokens
        and num_computed_tokens + 1 == sequence.num_tokens_with_inflight
    )
