"""An engine whose device is a dictionary: the oracle of the scheduler's tests.

The simulated KV cache holds, in each slot of each group of layers, the salt and the whole token history that the slot's
keys and values depend on; so does each slot of recurrent states. So every read can be compared with the sequence's true
history, which the device knows ahead of the scheduler. What a token sees is worked out here by brute force.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import groupby

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.kv_store.connector import StoredBlocks
from jaxis.engine.scheduling.block_connector import NO_CONNECTOR, NO_MOVES
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import NO_SLOT, Sequence, SequenceId, SequenceStatus
from jaxis.sampling_params import SamplingParams
from tests.support.simulated_store import SimulatedStore

VOCABULARY_SIZE = 24
EOS_TOKEN_ID = 0


def sample(history: list[int]) -> int:
    """The simulated model: any function of all tokens so far."""
    return zlib.crc32(bytes(history)) % VOCABULARY_SIZE


def generate(prompt: list[int], params: SamplingParams, max_total_tokens: int) -> tuple[list[int], str, int | None]:
    """Result that a sequence must have, whatever runs beside it: output tokens, finish reason, stop reason."""
    history = list(prompt)
    while True:
        token = sample(history)
        history.append(token)
        output = history[len(prompt) :]
        may_stop = len(output) - 1 >= params.min_tokens
        if may_stop and token == EOS_TOKEN_ID and not params.ignore_eos:
            return output, "stop", None
        if may_stop and token in params.stop_token_ids:
            return output, "stop", token
        if len(history) == max_total_tokens:
            return output, "length", None


def known_tokens(sequence: Sequence) -> list[int]:
    return sequence.prompt_token_ids + sequence.output_token_ids


def sees(span: AttentionSpan, position: int, earlier: int) -> bool:
    """True if the token at `position` sees the one at `earlier`, by the definition of each kind of attention."""
    in_window = span.sliding_window is None or position - earlier < span.sliding_window
    chunk = span.attention_chunk_size
    return earlier <= position and in_window and (chunk is None or position // chunk == earlier // chunk)


def same_client(sequence: Sequence, other: Sequence) -> bool:
    """True if two sequences are of one client."""
    return sequence.client == other.client


class SimulatedEngine:
    """Drives a scheduler, up to `run_ahead` + 1 steps in flight, and checks all that can be checked at every call."""

    def __init__(
        self,
        *,
        num_blocks: int | Mapping[AttentionSpan, int] = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        num_state_slots: int | None = None,
        run_ahead: int = 0,
        num_stages: int = 1,
        store: SimulatedStore | None = None,
        max_drafts: int = 0,
        shares: FairShares | None = None,
    ) -> None:
        if isinstance(num_blocks, int):
            num_blocks = {FULL_CONTEXT: num_blocks}
        self.store = store
        state_group = None if num_state_slots is None else len(num_blocks)
        connector = NO_CONNECTOR if store is None else StoredBlocks(store, state_group)
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching, num_state_slots, connector)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_stages=num_stages,
            shares=shares,
        )
        self.run_ahead = max(run_ahead, num_stages - 1)
        self.num_stages = num_stages
        self.max_drafts = max_drafts
        self.num_drafted = self.num_accepted = 0
        self._num_registered: dict[Sequence, int] = {}  # before the step
        self._rng = random.Random(0)
        self.memory: dict[tuple[int, int, int], tuple[str | None, tuple[int, ...]]] = {}
        self.states: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.histories: dict[Sequence, list[int]] = {}
        self.in_flight: deque[tuple[SchedulerOutput, list[list[int]]]] = deque()
        self.unfinished: list[Sequence] = []
        self.ended_early: set[Sequence] = set()
        self.computed: dict[Sequence, set[int]] = {}
        self.num_sequences = 0

    def add(
        self,
        prompt: list[int],
        *,
        priority: int = 0,
        client: str | None = None,
        cache_salt: str | None = None,
        **sampling: object,
    ) -> Sequence:
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
        sequence = Sequence(
            SequenceId(f"sequence-{self.num_sequences}"),
            list(prompt),
            params,
            frozenset({EOS_TOKEN_ID}),
            min(len(prompt) + params.max_tokens, self.scheduler.max_model_len),
            arrival=self.num_sequences,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
        )
        self.num_sequences += 1
        self.scheduler.add_sequence(sequence)
        self.histories[sequence] = list(prompt)
        self.computed[sequence] = set()
        self.unfinished.append(sequence)
        self.check()
        return sequence

    def schedule(self) -> SchedulerOutput | None:
        waiting = [sequence for sequence in self.unfinished if sequence.status is not SequenceStatus.RUNNING]
        running = [sequence for sequence in self.unfinished if sequence.status is SequenceStatus.RUNNING]
        self._num_registered = {sequence: sequence.num_registered_blocks for sequence in running}
        output = self.scheduler.schedule(self._drafts())
        if output is None:
            assert self.in_flight or not self.unfinished, "nothing runs and nothing ever will"
            self.check()
            return None
        self._check_order(waiting, running)
        self._dispatch(output)
        self.check()
        return output

    def update(self) -> list[tuple[Sequence, int]]:
        output, tokens = self.in_flight.popleft()
        if self.store is not None:
            self.store.commit()
        accepted = [entry.accepted(sampled) for entry, sampled in zip(output.scheduled, tokens, strict=True)]
        expected = [
            (entry.sequence, token)
            for entry, kept in zip(output.scheduled, accepted, strict=True)
            if entry.samples and not entry.sequence.status.finished
            for token in kept
        ]
        new_tokens = []
        for sequence, token, _ in self.scheduler.update(output, accepted):
            new_tokens.append((sequence, token))
            assert sequence.output_token_ids[-1] == token
            assert known_tokens(sequence) == self.histories[sequence][: sequence.num_tokens]
        # Entry by entry; a sequence that ends gets no further tokens.
        num_taken = 0
        for sequence, pairs in groupby(expected, key=lambda pair: pair[0]):
            taken = [pair for pair in new_tokens[num_taken:] if pair[0] is sequence]
            pairs = list(pairs)
            assert taken == new_tokens[num_taken : num_taken + len(taken)] == pairs[: len(taken)]
            assert len(taken) == len(pairs) or (taken and sequence.status.finished)
            num_taken += len(taken)
        assert num_taken == len(new_tokens)
        self.unfinished = [sequence for sequence in self.unfinished if not sequence.status.finished]
        self.check()
        return new_tokens

    def step(self) -> SchedulerOutput | None:
        """One turn of the engine's loop: dispatch a step, then take in the oldest once enough are in flight."""
        output = self.schedule()
        if self.in_flight and (output is None or len(self.in_flight) > self.run_ahead):
            self.update()
        return output

    def finish(self, sequence: Sequence, status: SequenceStatus = SequenceStatus.FINISHED_ABORTED) -> None:
        assert self.scheduler.finish_sequence(sequence.seq_id, status) is sequence
        assert sequence.status is status
        self.unfinished.remove(sequence)
        self.ended_early.add(sequence)
        self.check()

    def drain(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.unfinished and not self.in_flight:
                break
            self.step()
        assert not self.unfinished, "sequences are left: livelock"
        assert not self.scheduler.has_unfinished
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks
        if self.block_manager.states.pools:
            self.block_manager.states.begin_step()  # which gives back what the step before held
            assert self.block_manager.states.pool.num_free_blocks == self.block_manager.states.pool.num_blocks
        for sequence in self.histories:
            assert sequence.num_inflight_tokens == 0
            expected, finish_reason, stop_reason = generate(
                sequence.prompt_token_ids, sequence.sampling_params, sequence.max_total_tokens
            )
            if sequence in self.ended_early:
                assert sequence.output_token_ids == expected[: len(sequence.output_token_ids)]
            else:
                assert sequence.output_token_ids == expected
                if sequence.sampling_params.prompt_logprobs is not None:
                    assert self.computed[sequence] >= set(range(sequence.num_prompt_tokens))
                assert (sequence.status.finish_reason, sequence.stop_reason) == (finish_reason, stop_reason)

    def _dispatch(self, output: SchedulerOutput) -> None:
        """Runs the step as the device would. Steps run in order, so running it at once changes nothing."""
        assert 0 < output.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({entry.sequence for entry in output.scheduled}) == len(output.scheduled)
        if self.num_stages > 1:
            for entry in output.scheduled:
                assert entry.sequence.num_inflight_tokens == entry.samples, "a token in flight is needed"
        for index, entry in enumerate(output.scheduled):
            history = self.histories[entry.sequence]
            num_known = entry.num_tokens - entry.num_drafts
            assert num_known >= 1
            assert entry.start + num_known <= len(history)
            assert entry.samples == (entry.start + num_known == len(history))
            is_decode = entry.start == len(history) - 1 and entry.start >= entry.sequence.num_prompt_tokens
            if entry.num_drafts:
                assert output.num_decodes <= index
                assert entry.samples
                assert entry.start + entry.num_tokens < entry.sequence.max_total_tokens
                assert known_tokens(entry.sequence) == history, "drafts follow what is known"
                # With states, right drafts may be computed again.
                assert is_decode or entry.state is not None or entry.sequence.num_preemptions
                # What the device computes, until it is known which drafts are right.
                history.extend(entry.draft_token_ids)
            else:
                assert is_decode == (index < output.num_decodes)
        assert not output.has_drafts or all(e.start >= e.sequence.num_prompt_tokens for e in output.scheduled)
        self._move_blocks(output)
        self._check_writes(output)
        for entry in output.scheduled:
            for position in range(entry.start, entry.start + entry.num_tokens):
                for group in range(len(self.block_manager.pools)):
                    slot = self._slot(entry.sequence, group, position)
                    self.memory[slot] = self._content(entry.sequence, position)
                self.computed[entry.sequence].add(position)
        self._compute_states(output)
        tokens = []
        for entry in output.scheduled:
            self._check_reads(entry.sequence, entry.start, entry.start + entry.num_tokens)
            history = self.histories[entry.sequence]
            stop = len(history) - entry.num_drafts
            tokens.append([sample(history[: stop + i]) if entry.samples else -1 for i in range(entry.num_rows)])
            del history[stop:]
            if entry.samples:
                accepted = entry.accepted(tokens[-1])
                history.extend(accepted)
                self.num_drafted += entry.num_drafts
                self.num_accepted += len(accepted) - 1
                assert len(history) <= entry.sequence.max_total_tokens
        self.in_flight.append((output, tokens))

    def _check_writes(self, output: SchedulerOutput) -> None:
        """No sequence writes to a block that others hold, or could have found before the step."""
        for entry in output.scheduled:
            num_registered = self._num_registered.get(entry.sequence, 0)
            assert entry.start >= num_registered * self.block_manager.block_size, "a registered block is written to"
            for group, pool in enumerate(self.block_manager.pools):
                for position in range(entry.start, entry.start + entry.num_tokens):
                    _, block_id, _ = self._slot(entry.sequence, group, position)
                    assert pool._ref_counts[block_id] == 1, "a shared block is written to"

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Copies blocks to and from the store, before anything is computed."""
        if self.store is None:
            assert output.moves == NO_MOVES
            return
        moves = output.moves
        assert len({(save.group, save.digest) for save in moves.saves}) == len(moves.saves)
        assert len({(load.group, load.block_id) for load in moves.loads}) == len(moves.loads)
        saved = [(save, self._block_content(save.group, save.block_id)) for save in moves.saves]
        for save, content in saved:
            last = content if isinstance(content, tuple) else content[-1]
            assert save.digest == chained_digest(*last, self.block_manager.block_size), "another block is saved"
        self.store.dispatch(saved)
        for group, _, block_id, content in moves.loads:
            if group == len(self.block_manager.pools):
                self.states[block_id] = content
            else:
                for offset, token in enumerate(content):
                    self.memory[group, block_id, offset] = token

    def _block_content(self, group: int, block_id: int) -> object:
        if group == len(self.block_manager.pools):
            return self.states[block_id]
        return [self.memory[group, block_id, offset] for offset in range(self.block_manager.block_size)]

    def _drafts(self) -> dict[SequenceId, list[int]]:
        """Drafts of the next tokens: of random lengths, the true ones with random mistakes among them."""
        drafts = {}
        for sequence in self.unfinished if self.max_drafts else ():
            history = known_tokens(sequence)
            ahead: list[int] = []
            for _ in range(self._rng.randint(0, self.max_drafts)):
                is_right = self._rng.random() < 0.7
                ahead.append(sample(history + ahead) if is_right else self._rng.randrange(VOCABULARY_SIZE))
            drafts[sequence.seq_id] = ahead
        return drafts

    def _compute_states(self, output: SchedulerOutput) -> None:
        """Reads and writes the states. The sequences of a step run in no particular order."""
        if not self.block_manager.states.pools:
            assert all(entry.state is None for entry in output.scheduled)
            return
        read, written = Counter(), {}
        for entry in output.scheduled:
            state, sequence = entry.state, entry.sequence
            if entry.start == 0:
                assert state.read == NO_SLOT
            else:
                assert self.states[state.read] == self._content(sequence, entry.start - 1), "another's state is read"
            read[state.read] += state.read != state.write
            targets = {state.write: entry.start + entry.num_tokens}
            if state.keep != NO_SLOT:
                assert 1 <= state.keep_after <= entry.num_tokens
                assert state.keep != state.write
                targets[state.keep] = entry.start + state.keep_after
                is_for_rollback = entry.num_drafts and targets[state.keep] == entry.known_stop
                assert targets[state.keep] % self.block_manager.block_size == 0 or is_for_rollback
            for slot, length in targets.items():
                assert 0 <= slot < self.block_manager.states.pool.num_blocks
                assert slot not in written, "two sequences write to a slot"
                written[slot] = self._content(sequence, length - 1)
        assert not any(read[slot] for slot in written), "a state is overwritten in the step that reads it"
        self.states |= written

    def _slot(self, sequence: Sequence, group: int, position: int) -> tuple[int, int, int]:
        index, offset = divmod(position, self.block_manager.block_size)
        table = sequence.block_tables[group]
        assert index >= table.first, f"{sequence.seq_id} has given back the block of position {position}"
        return group, table.block_ids[index - table.first], offset

    def _content(self, sequence: Sequence, position: int) -> tuple[str | None, tuple[int, ...]]:
        return sequence.cache_salt, tuple(self.histories[sequence][: position + 1])

    def _check_reads(self, sequence: Sequence, start: int, stop: int) -> None:
        """Checks that what the tokens at `start` to `stop` see is there and is the sequence's own."""
        for group, span in enumerate(self.block_manager.spans):
            # Each kind of attention sees a stretch that ends at the token: the first token sees furthest back.
            for position in range(stop):
                if position >= start or sees(span, start, position):
                    content = self.memory[self._slot(sequence, group, position)]
                    assert content == self._content(sequence, position), f"{sequence.seq_id} reads another's"

    def _check_order(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        admitted = [sequence for sequence in waiting if sequence.status is SequenceStatus.RUNNING]
        preempted = [sequence for sequence in running if sequence.status is SequenceStatus.PREEMPTED]
        kept = [sequence for sequence in running if sequence.status is SequenceStatus.RUNNING]
        passed_over = [sequence for sequence in waiting if sequence.status is not SequenceStatus.RUNNING]
        if len({sequence.client for sequence in self.unfinished}) <= 1:
            assert not (admitted and preempted), "blocks freed by preemption went to a newcomer"
        for sequence in admitted:
            assert all(sequence.priority <= other.priority for other in passed_over)
            assert all(
                sequence.service_order < other.service_order for other in passed_over if same_client(sequence, other)
            )
        for sequence in preempted:
            assert all(sequence.service_order > other.service_order for other in kept if same_client(sequence, other))

    def check(self) -> None:
        """The invariants that hold between any two calls."""
        manager, scheduler = self.block_manager, self.scheduler
        running = [sequence for sequence in self.unfinished if sequence.status is SequenceStatus.RUNNING]
        assert scheduler.num_running == len(running) <= scheduler.max_num_seqs
        assert scheduler.num_waiting == len(self.unfinished) - len(running)
        assert scheduler.has_unfinished == bool(self.unfinished)

        for sequence, history in self.histories.items():
            assert sequence.num_inflight_tokens >= 0
            if sequence.status is not SequenceStatus.RUNNING:
                assert not sequence.block_tables
                assert sequence.state is None
            if not sequence.status.finished:
                num_right = len(history) - sequence.num_tokens_with_inflight
                assert 0 <= num_right <= sequence.num_inflight_drafts
                self._check_seen_by_next(sequence)
        for group in range(len(manager.pools)):
            self._check_pool(group)
        self._check_states()
        assert manager.num_free_blocks == sum(pool.num_free_blocks for pool in manager.pools)
        pools = [*manager.pools, *manager.states.pools]
        assert manager.usage == max(1 - pool.num_free_blocks / pool.num_blocks for pool in pools)

    def _check_seen_by_next(self, sequence: Sequence) -> None:
        """All that the next token to be computed will see of those before it is there."""
        for group, span in enumerate(self.block_manager.spans):
            for position in range(sequence.num_computed_tokens):
                if sees(span, sequence.num_computed_tokens, position):
                    content = self.memory[self._slot(sequence, group, position)]
                    assert content == self._content(sequence, position)

    def _check_pool(self, group: int) -> None:
        manager, span, pool = self.block_manager, self.block_manager.spans[group], self.block_manager.pools[group]
        held = Counter(
            block_id for sequence, _ in self._holders() for block_id in sequence.block_tables[group].block_ids
        )
        for block_id in range(pool.num_blocks):
            assert pool._ref_counts[block_id] == held[block_id]
            assert (block_id in pool._free) + (block_id in pool._out_of_window) == (held[block_id] == 0)
        assert pool.num_free_blocks == pool.num_blocks - len(held)

        sharers: dict[int, set[tuple[str | None, tuple[int, ...]]]] = {}
        for sequence, history in self._holders():
            table = sequence.block_tables[group]
            assert len(set(table.block_ids)) == len(table.block_ids)
            assert table.stop * manager.block_size >= sequence.num_computed_tokens
            assert len(table.block_ids) <= span.max_held_blocks(
                1, sequence.max_total_tokens - 1, manager.block_size, self.scheduler.max_num_batched_tokens
            )
            assert (table.first == 0) or span != FULL_CONTEXT
            for index, block_id in enumerate(table.block_ids, start=table.first):
                prefix = tuple(history[: (index + 1) * manager.block_size])
                sharers.setdefault(block_id, set()).add((sequence.cache_salt, prefix))
        assert all(len(prefixes) == 1 for prefixes in sharers.values())

        registered = {b: digest for b, digest in enumerate(pool._digest_of_block) if digest is not None}
        assert pool._block_of_digest == {digest: block_id for block_id, digest in registered.items()}
        assert manager.enable_prefix_caching or not registered
        for block_id, digest in registered.items():
            salt, history = self.memory[group, block_id, manager.block_size - 1]
            assert digest == chained_digest(salt, history, manager.block_size)

    def _check_states(self) -> None:
        """Every slot belongs to the sequence that it should, and holds what it should."""
        states = self.block_manager.states
        if not states.pools:
            return
        held = Counter(states._to_give_back)
        for sequence in self.histories:
            state = sequence.state
            if state is None:
                continue
            drafted = state.drafted
            assert (drafted is not None) == (sequence.num_inflight_drafts > 0)
            if num_read := sequence.num_computed_tokens if drafted is None else drafted.start:
                assert self.states[state.read] == self._content(sequence, num_read - 1)
            held.update({state.read, state.write, NO_SLOT if drafted is None else drafted.keep} - {NO_SLOT})
            held.update(slot for _, slot in state.unregistered)
        for slot in range(states.pool.num_blocks):
            assert states.pool._ref_counts[slot] == held[slot]
            assert (slot in states.pool._free) == (held[slot] == 0)
            digest = states.pool._digest_of_block[slot]
            if digest is not None:
                assert self.block_manager.enable_prefix_caching
                assert states.pool.find(digest) == slot
                assert digest == chained_digest(*self.states[slot], self.block_manager.block_size)

    def _holders(self) -> Iterator[tuple[Sequence, list[int]]]:
        return ((sequence, history) for sequence, history in self.histories.items() if sequence.block_tables)


def chained_digest(salt: str | None, tokens: tuple[int, ...], block_size: int) -> bytes:
    """The last full block's name, written out anew."""
    digest = bytes(32) if salt is None else hashlib.sha256(salt.encode()).digest()
    for start in range(0, len(tokens), block_size):
        block = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + block_size])
        digest = hashlib.sha256(digest + block).digest()
    return digest
