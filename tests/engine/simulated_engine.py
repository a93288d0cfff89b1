"""An engine whose device is a dictionary: the oracle of the scheduler's tests.

The simulated KV cache holds, in each slot of each group of layers, the salt and the whole token history that the slot's
keys and values depend on. So every read can be compared with the request's true history, which the device knows ahead
of the scheduler. What a token sees is worked out here by brute force.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.scheduler import Scheduler, SchedulerOutput
from jaxis.engine.scheduling.sequence import Request, RequestStatus
from jaxis.sampling_params import SamplingParams

VOCABULARY_SIZE = 24
EOS_TOKEN_ID = 0


def sample(history: list[int]) -> int:
    """The simulated model: any function of all tokens so far."""
    return zlib.crc32(bytes(history)) % VOCABULARY_SIZE


def generate(prompt: list[int], params: SamplingParams, max_total_tokens: int) -> tuple[list[int], str, int | None]:
    """What a request must return, whatever runs beside it: output tokens, finish reason, stop reason."""
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


def sees(span: AttentionSpan, position: int, earlier: int) -> bool:
    """Whether the token at `position` sees the one at `earlier`, by the definition of each kind of attention."""
    in_window = span.sliding_window is None or position - earlier < span.sliding_window
    chunk = span.attention_chunk_size
    return earlier <= position and in_window and (chunk is None or position // chunk == earlier // chunk)


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
        run_ahead: int = 0,
    ) -> None:
        if isinstance(num_blocks, int):
            num_blocks = {FULL_CONTEXT: num_blocks}
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.run_ahead = run_ahead
        self.memory: dict[tuple[int, int, int], tuple[str | None, tuple[int, ...]]] = {}
        self.histories: dict[Request, list[int]] = {}
        self.in_flight: deque[tuple[SchedulerOutput, list[int]]] = deque()
        self.unfinished: list[Request] = []
        self.ended_early: set[Request] = set()
        self.computed: dict[Request, set[int]] = {}
        self.num_requests = 0

    def add(
        self, prompt: list[int], *, priority: int = 0, cache_salt: str | None = None, **sampling: object
    ) -> Request:
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
        request = Request(
            f"request-{self.num_requests}",
            list(prompt),
            params,
            frozenset({EOS_TOKEN_ID}),
            min(len(prompt) + params.max_tokens, self.scheduler.max_model_len),
            arrival=self.num_requests,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.num_requests += 1
        self.scheduler.add_request(request)
        self.histories[request] = list(prompt)
        self.computed[request] = set()
        self.unfinished.append(request)
        self.check()
        return request

    def schedule(self) -> SchedulerOutput | None:
        waiting = [request for request in self.unfinished if request.status is not RequestStatus.RUNNING]
        running = [request for request in self.unfinished if request.status is RequestStatus.RUNNING]
        output = self.scheduler.schedule()
        if output is None:
            assert self.in_flight or not self.unfinished, "nothing runs and nothing ever will"
            self.check()
            return None
        self._check_order(waiting, running)
        self._dispatch(output)
        self.check()
        return output

    def update(self) -> list[tuple[Request, int]]:
        output, tokens = self.in_flight.popleft()
        sampling = [entry.request for entry in output.scheduled if entry.samples]
        expected = [request for request in sampling if not request.status.finished]
        new_tokens = self.scheduler.update(output, tokens)
        assert [request for request, _ in new_tokens] == expected
        for request, token in new_tokens:
            assert request.output_token_ids[-1] == token
            assert request.all_token_ids == self.histories[request][: request.num_tokens]
        self.unfinished = [request for request in self.unfinished if not request.status.finished]
        self.check()
        return new_tokens

    def step(self) -> SchedulerOutput | None:
        """One turn of the engine's loop: dispatch a step, then take in the oldest once enough are in flight."""
        output = self.schedule()
        if self.in_flight and (output is None or len(self.in_flight) > self.run_ahead):
            self.update()
        return output

    def finish(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> None:
        assert self.scheduler.finish_request(request.request_id, status) is request
        assert request.status is status
        self.unfinished.remove(request)
        self.ended_early.add(request)
        self.check()

    def drain(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.unfinished and not self.in_flight:
                break
            self.step()
        assert not self.unfinished, "requests are left: livelock"
        assert not self.scheduler.has_unfinished
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks
        for request in self.histories:
            assert request.num_inflight_tokens == 0
            expected, finish_reason, stop_reason = generate(
                request.prompt_token_ids, request.sampling_params, request.max_total_tokens
            )
            if request in self.ended_early:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected
                if request.sampling_params.prompt_logprobs is not None:
                    assert self.computed[request] >= set(range(request.num_prompt_tokens))
                assert (request.status.finish_reason, request.stop_reason) == (finish_reason, stop_reason)

    def _dispatch(self, output: SchedulerOutput) -> None:
        """Runs the step as the device would. Steps run in order, so running it at once changes nothing."""
        assert 0 < output.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({entry.request for entry in output.scheduled}) == len(output.scheduled)
        for index, entry in enumerate(output.scheduled):
            history = self.histories[entry.request]
            assert entry.num_tokens >= 1
            assert entry.start + entry.num_tokens <= len(history)
            assert entry.samples == (entry.start + entry.num_tokens == len(history))
            is_decode = entry.start == len(history) - 1 and entry.start >= entry.request.num_prompt_tokens
            assert is_decode == (index < output.num_decodes)
        for entry in output.scheduled:
            for position in range(entry.start, entry.start + entry.num_tokens):
                for group, pool in enumerate(self.block_manager.pools):
                    slot = self._slot(entry.request, group, position)
                    assert pool._ref_counts[slot[1]] == 1, "a shared block is written to"
                    self.memory[slot] = self._content(entry.request, position)
                self.computed[entry.request].add(position)
        tokens = []
        for entry in output.scheduled:
            self._check_reads(entry.request, entry.start, entry.start + entry.num_tokens)
            history = self.histories[entry.request]
            tokens.append(sample(history) if entry.samples else -1)
            if entry.samples:
                history.append(tokens[-1])
                assert len(history) <= entry.request.max_total_tokens
        self.in_flight.append((output, tokens))

    def _slot(self, request: Request, group: int, position: int) -> tuple[int, int, int]:
        index, offset = divmod(position, self.block_manager.block_size)
        table = request.block_tables[group]
        assert index >= table.first, f"{request.request_id} has given back the block of position {position}"
        return group, table.block_ids[index - table.first], offset

    def _content(self, request: Request, position: int) -> tuple[str | None, tuple[int, ...]]:
        return request.cache_salt, tuple(self.histories[request][: position + 1])

    def _check_reads(self, request: Request, start: int, stop: int) -> None:
        """What the tokens at `start` to `stop` see is there and is the request's own."""
        for group, span in enumerate(self.block_manager.spans):
            # Each kind of attention sees a stretch that ends at the token: whoever comes first sees furthest back.
            for position in range(stop):
                if position >= start or sees(span, start, position):
                    content = self.memory[self._slot(request, group, position)]
                    assert content == self._content(request, position), f"{request.request_id} reads another's"

    def _check_order(self, waiting: list[Request], running: list[Request]) -> None:
        admitted = [request for request in waiting if request.status is RequestStatus.RUNNING]
        preempted = [request for request in running if request.status is RequestStatus.PREEMPTED]
        kept = [request for request in running if request.status is RequestStatus.RUNNING]
        passed_over = [request for request in waiting if request.status is not RequestStatus.RUNNING]
        assert not (admitted and preempted), "blocks freed by preemption went to a newcomer"
        for request in admitted:
            assert all(request.service_order < other.service_order for other in passed_over)
        for request in preempted:
            assert all(request.service_order > other.service_order for other in kept)

    def check(self) -> None:
        """The invariants that hold between any two calls."""
        manager, scheduler = self.block_manager, self.scheduler
        running = [request for request in self.unfinished if request.status is RequestStatus.RUNNING]
        assert scheduler.num_running == len(running) <= scheduler.max_num_seqs
        assert scheduler.num_waiting == len(self.unfinished) - len(running)
        assert scheduler.has_unfinished == bool(self.unfinished)

        for request, history in self.histories.items():
            assert request.num_inflight_tokens >= 0
            if request.status is not RequestStatus.RUNNING:
                assert not request.block_tables
            if not request.status.finished:
                assert request.num_tokens_with_inflight == len(history)
                self._check_seen_by_next(request)
        for group in range(len(manager.pools)):
            self._check_pool(group)
        assert manager.num_free_blocks == sum(pool.num_free_blocks for pool in manager.pools)
        assert manager.usage == max(1 - pool.num_free_blocks / pool.num_blocks for pool in manager.pools)

    def _check_seen_by_next(self, request: Request) -> None:
        """All that the next token to be computed will see of those before it is there."""
        for group, span in enumerate(self.block_manager.spans):
            for position in range(request.num_computed_tokens):
                if sees(span, request.num_computed_tokens, position):
                    content = self.memory[self._slot(request, group, position)]
                    assert content == self._content(request, position)

    def _check_pool(self, group: int) -> None:
        manager, span, pool = self.block_manager, self.block_manager.spans[group], self.block_manager.pools[group]
        held = Counter(block_id for request, _ in self._holders() for block_id in request.block_tables[group].block_ids)
        for block_id in range(pool.num_blocks):
            assert pool._ref_counts[block_id] == held[block_id]
            assert (block_id in pool._free) + (block_id in pool._passed) == (held[block_id] == 0)
        assert pool.num_free_blocks == pool.num_blocks - len(held)

        sharers: dict[int, set[tuple[str | None, tuple[int, ...]]]] = {}
        for request, history in self._holders():
            table = request.block_tables[group]
            assert len(set(table.block_ids)) == len(table.block_ids)
            assert table.stop * manager.block_size >= request.num_computed_tokens
            assert len(table.block_ids) <= span.max_held_blocks(
                1, request.max_total_tokens - 1, manager.block_size, self.scheduler.max_num_batched_tokens
            )
            assert (table.first == 0) or span != FULL_CONTEXT
            for index, block_id in enumerate(table.block_ids, start=table.first):
                prefix = tuple(history[: (index + 1) * manager.block_size])
                sharers.setdefault(block_id, set()).add((request.cache_salt, prefix))
        assert all(len(prefixes) == 1 for prefixes in sharers.values())

        registered = {b: digest for b, digest in enumerate(pool._digest_of_block) if digest is not None}
        assert pool._block_of_digest == {digest: block_id for block_id, digest in registered.items()}
        assert manager.enable_prefix_caching or not registered
        for block_id, digest in registered.items():
            salt, history = self.memory[group, block_id, manager.block_size - 1]
            assert digest == chained_digest(salt, history, manager.block_size)

    def _holders(self) -> Iterator[tuple[Request, list[int]]]:
        return ((request, history) for request, history in self.histories.items() if request.block_tables)


def chained_digest(salt: str | None, tokens: tuple[int, ...], block_size: int) -> bytes:
    """The last full block's name, written out anew."""
    digest = bytes(32) if salt is None else hashlib.sha256(salt.encode()).digest()
    for start in range(0, len(tokens), block_size):
        block = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + block_size])
        digest = hashlib.sha256(digest + block).digest()
    return digest
