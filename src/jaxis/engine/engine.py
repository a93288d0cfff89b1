"""The engine: requests in, tokens out, one step at a time.

A step is schedule -> dispatch -> update. The next step is dispatched before this one's tokens are read, so that the
devices never wait for the host. Where a sequence needs its newest token to sample the next one (penalties, structured
output), only the model of the next step runs ahead: its sampler is dispatched once the tokens are read. Where a
sequence gets drafts (speculative decoding), nothing runs ahead. With pipeline stages, as many steps are in flight as
there are stages, each with other sequences, whose newest tokens the host knows: drafts change nothing there.
"""

from __future__ import annotations

import itertools
import time
from collections import abc, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.drafting.make import make_speculation
from jaxis.engine.execution.dispatched_step import DispatchedStep
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.programs import CompileWait
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.sampler import INVALID_TOKEN_ID
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.kv_events.streams import CacheEventStreams
from jaxis.engine.kv_store.stats import TierStats
from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.paged_logits import paged_logits
from jaxis.engine.request_factory import RequestFactory
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.cache_events import CacheEventRecorder
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxis.engine.stored_blocks import StoredBlocks
from jaxis.engine.unfinished_requests import UnfinishedRequests
from jaxis.errors import EngineError, RequestError
from jaxis.host.deadline import Deadline
from jaxis.outputs import RequestOutput
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.engine.execution.token_logprobs import TokenLogprobs
    from jaxis.engine.grammar.delayed_grammar import Grammar
    from jaxis.engine.kv_store.peers import Peers
    from jaxis.tokenizer import Tokenizer


class LLMEngine:
    """Serves requests with one model.

    Attributes:
      max_model_len: Most tokens of a sequence, prompt and output together.
      eos_token_ids: Tokens that end a sequence.
      scheduler: Decides what runs, on each data rank.
      runner: Runs it.
      grammar_compiler: Compiles `structured_outputs`; may be used from other threads.
      stored: Blocks beyond the devices; None: there are none.
      num_preemptions: Times that a sequence lost its blocks to another, since the start.
      speculation: Makes drafts of sequences' next tokens; None: none are made.

    Args:
      vllm_config: The engine's configuration.
      executor: Has the model and its caches.
      tokenizer: The checkpoint's, if it has one.
      eos_token_ids: Tokens that end a sequence.
      store: Where blocks go that the devices have no room for; None: nowhere.
      peers: Other engines that blocks go to or come from; they need a store.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor: Executor,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        store: KVStore | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.runner = Runner(vllm_config, executor, store)
        self.stored = None if self.runner.transfer is None else StoredBlocks(self.runner.transfer, peers)
        self.max_model_len = self.runner.max_model_len
        self.grammar_compiler = GrammarCompiler(tokenizer, self.runner.vocab_size, eos_token_ids)
        self.num_preemptions = 0
        self.speculation = make_speculation(vllm_config.speculative_config, self.runner, self._extend_blocks)
        self._events = CacheEventStreams(
            vllm_config.kv_events_config,
            tuple(self.runner.num_blocks),
            vllm_config.cache_config.block_size,
            self.runner.num_ranks,
        )
        # Totals of earlier block managers, which a failed step replaces.
        self._past_prefix_cache_queries = self._past_prefix_cache_hits = 0
        self._factory = RequestFactory(
            tokenizer,
            eos_token_ids,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            seed=vllm_config.model_config.seed,
        )
        self._reset_state()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def prefix_cache_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache, since the start."""
        return self._past_prefix_cache_queries + self.scheduler.block_manager.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """How many of `prefix_cache_queries` were found."""
        return self._past_prefix_cache_hits + self.scheduler.block_manager.prefix_cache_hits

    @property
    def last_compile_wait(self) -> CompileWait | None:
        """When a step last waited for a program to compile, if one did. Other threads may ask."""
        return self.runner.last_compile_wait

    @property
    def silent_hosts(self) -> abc.Sequence[str]:
        """Other hosts that the model runs on and that have not been heard of for some time. Other threads may ask."""
        return self.runner.executor.silent_hosts

    def on_lost(self, callback: abc.Callable[[EngineError], None], stall_seconds: float) -> None:
        """See `Executor.on_lost`."""
        self.runner.executor.on_lost(callback, stall_seconds)

    def give_up_other_hosts(self, reason: str) -> None:
        """See `Executor.give_up_other_hosts`. Other threads may call it."""
        self.runner.executor.give_up_other_hosts(reason)

    def end_other_hosts(self) -> None:
        """Ends the other hosts that the model runs on; no step may follow."""
        self.runner.executor.end_other_hosts()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Queues a request for `params.n` completions of a prompt.

        Args:
          request_id: Unique among unfinished requests.
          prompt_token_ids: At least one.
          params: How to sample and when to stop.
          prompt: The prompt's text, for the output.
          priority: The lower value is served first.
          cache_salt: Only requests with the same salt share prefix-cache blocks.
          grammar: `params.structured_outputs`, compiled; None compiles it here, which may take seconds.

        Returns:
          The request, which `step` advances.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured; nothing was queued.
        """
        prompt_token_ids = self._factory.checked_prompt(prompt_token_ids)
        self._factory.check_needs_no_tokenizer(params)
        if params.kv_transfer is not None and (self.stored is None or self.stored.peers is None):
            raise RequestError("kv_transfer_params needs an engine with kv_transfer_config: leave it out")
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} already exists: wait for it, abort it, or choose another id")
        if params.structured_outputs is None:
            grammar = None
        elif grammar is None:
            grammar = self.grammar_compiler.compile(params.structured_outputs)
        request = self._factory.make(
            request_id,
            prompt_token_ids,
            params,
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
            reads_prediction=self.speculation is not None,
        )
        added = []
        try:
            for completion in request.completions:
                self.scheduler.add_sequence(completion.sequence)
                added.append(completion.sequence.seq_id)
        except RequestError:
            for seq_id in added:
                self.scheduler.abort_sequence(seq_id)
            raise
        self._requests.add(request)
        if self.stored is not None:
            self.stored.begin(request, self.scheduler)
        if self.speculation is not None and params.prediction:
            self.speculation.prepare(self.scheduler.num_running + 1)
        return request

    def fetches_blocks(self, params: SamplingParams) -> bool:
        """See `StoredBlocks.fetches`."""
        return self.stored is not None and self.stored.fetches(params)

    def fetch_blocks(
        self,
        prompt_token_ids: abc.Sequence[int],
        cache_salt: str | None,
        params: SamplingParams,
        deadline: Deadline | None = None,
    ) -> None:
        """See `StoredBlocks.fetch`. Other threads may call it while steps run."""
        if self.stored is not None:
            self.stored.fetch(self.scheduler, prompt_token_ids, cache_salt, params, deadline)

    @property
    def kv_tiers(self) -> dict[str, TierStats]:
        """What each tier of blocks beyond the devices has done, by its name. Other threads may ask."""
        return {} if self.stored is None else self.stored.stats

    def finish_saves(self) -> None:
        """See `StoredBlocks.finish_saves`."""
        if self.stored is not None:
            self.stored.finish_saves(self.scheduler)

    def close_store(self) -> None:
        """See `StoredBlocks.close`."""
        if self.stored is not None:
            self.stored.close(self.scheduler)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request; returns what it has so far, or None if it is not unfinished."""
        request = self._requests.pop(request_id)
        if request is None:
            return None
        for completion in request.completions:
            if not completion.sequence.status.finished:
                self.scheduler.abort_sequence(completion.sequence.seq_id)
                completion.finish()
            if self.speculation is not None:
                self.speculation.forget(completion.sequence)
            self._requests.end(completion)
        if self.stored is not None:
            self.stored.end(request)
        return request.output()

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that got new tokens, including those that ended.

        A request whose logits are not finite, or whose grammar no token can continue, ends with its `error` set.

        Raises:
          EngineError: The step failed. Every unfinished request is lost, with its `error` set; the engine accepts new
            requests.
        """
        try:
            requests = self._step() if self.runner.num_stages == 1 else self._step_of_stages()
            self._events.publish()
            return requests
        except BaseException as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            message = f"a step failed and {len(self._requests)} requests were lost: {message}"
            self.reset(message)
            if isinstance(error, Exception):
                raise EngineError(message) from error
            raise

    def reset(self, reason: str = "the engine was reset") -> None:
        """Drops the prefix cache and every request, whose `error` then has the reason."""
        self._start_over(reason)
        self.runner.recover()

    def compute_logits(self, token_ids: abc.Sequence[int], *, paged: bool) -> np.ndarray:
        """Logits float32 [T, V] of every position of one sequence.

        Args:
          token_ids: T tokens.
          paged: Run through the KV cache in chunks, as prompts are served; otherwise the whole sequence at once without
            a cache.

        Raises:
          RequestError: No tokens, an unknown one, or too many for the cache.
          EngineError: Requests are running.
        """
        if self.has_unfinished:
            raise EngineError("compute_logits requires an idle engine: finish or abort the running requests first")
        token_ids = self._factory.checked_prompt(token_ids, spare=0)
        if not paged:
            return self.runner.whole_logits(token_ids)
        self._discard_inflight()
        chunk = self.vllm_config.scheduler_config.max_num_batched_tokens
        try:
            return paged_logits(self.runner, self.scheduler, token_ids, chunk)
        except BaseException:
            self.reset()  # the caches were donated to the step, which may have invalidated them
            raise

    def iterate_logits(self, token_ids: abc.Sequence[int]) -> Iterator[np.ndarray]:
        """As `compute_logits` without a cache, a few rows of [T, V] at a time.

        Raises:
          RequestError, EngineError: See `compute_logits`.
        """
        if self.has_unfinished:
            raise EngineError("iterate_logits requires an idle engine: finish or abort the running requests first")
        return self.runner.iterate_whole_logits(self._factory.checked_prompt(token_ids, spare=0))

    def close(self) -> None:
        """Frees the device memory; the engine cannot be used afterwards."""
        self.close_store()
        self._start_over("the engine was closed")
        self.runner.close()
        self._events.close()

    def _start_over(self, reason: str) -> None:
        """Fails every request, and resets everything except the counters."""
        for request in self._requests:
            request.error = EngineError(reason)
            if self.stored is not None:
                self.stored.end(request)
        self._past_prefix_cache_queries = self.prefix_cache_queries
        self._past_prefix_cache_hits = self.prefix_cache_hits
        self._reset_state()

    def reset_prefix_cache(self) -> None:
        """Makes requests that are added from now on find nothing that was computed before; running ones go on."""
        self.scheduler.block_manager.reset_prefix_cache()
        self._events.publish()

    def _reset_state(self) -> None:
        """Resets to no requests and an empty prefix cache."""
        ranks = [self._new_scheduler(recorder) for recorder in self._events.recorders]
        self._events.clear()
        self.scheduler = ranks[0] if len(ranks) == 1 else DataRanksScheduler(ranks)
        self._requests = UnfinishedRequests()
        self._inflight: deque[DispatchedStep] = deque()
        self._last_step_ended = 0.0
        if self.speculation is not None:
            self.speculation.reset()

    def _new_scheduler(self, events: CacheEventRecorder | None) -> Scheduler:
        """The scheduler of a data rank, with its blocks, and with what records their events."""
        cache, limits = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        return Scheduler(
            BlockManager(
                self.runner.num_blocks,
                cache.block_size,
                cache.enable_prefix_caching,
                self.runner.num_state_slots,
                None if self.stored is None else self.stored.store,
                events,
                self.runner.executor.num_seen_again,
            ),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_stages=self.runner.num_stages,
        )

    def _step(self) -> list[Request]:
        # A step that was dispatched ahead began when the one before it was taken in.
        started = self._last_step_ended if self._inflight else time.monotonic()
        current = self._inflight.popleft() if self._inflight else self._dispatch()
        if current is None:
            return []
        num_running, speculation = self.scheduler.num_running, self.speculation
        if current.output.has_drafts or (
            speculation is not None and speculation.wants_newest_tokens(current.output, num_running)
        ):
            requests = self._process(current)
        elif any(self._requests.needs_newest_token(entry.sequence) for entry in current.output.scheduled):
            output = self._schedule()
            step = None if output is None else self.runner.forward(output)
            requests = self._process(current)
            if step is not None:
                self._inflight.append(step.sample(self._requests.sampling))
        else:
            if (following := self._dispatch()) is not None:
                self._inflight.append(following)
            requests = self._process(current)
        self._note_time(current, started)
        if not self.scheduler.has_unfinished:
            self._discard_inflight()
            if self.stored is not None and self.stored.store.is_awaited:
                self.finish_saves()  # another engine waits
        return requests

    def _step_of_stages(self) -> list[Request]:
        """Takes in the oldest of the steps in flight."""
        # Steps that overlap take as long as it is from one's end to the next one's.
        started = self._last_step_ended if self._inflight else time.monotonic()
        self._fill_stages()
        if not self._inflight:
            return []
        current = self._inflight.popleft()
        requests = self._process(current)
        self._note_time(current, started)
        if self.scheduler.has_unfinished:
            self._fill_stages()
        else:
            self._discard_inflight()
        return requests

    def _fill_stages(self) -> None:
        """Dispatches steps until there is one for each pipeline stage, as far as sequences have no token in flight."""
        while len(self._inflight) < self.runner.num_stages and (step := self._dispatch()) is not None:
            self._inflight.append(step)

    def _note_time(self, step: DispatchedStep, started: float) -> None:
        """Learns when a step ended, and how long it took unless it waited for a program."""
        self._last_step_ended = time.monotonic()
        if self.speculation is not None:
            wait = self.last_compile_wait
            if wait is None or wait.started < started:
                self.speculation.observe_time(step.output, self._last_step_ended - started)

    def _dispatch(self) -> DispatchedStep | None:
        output = self._schedule()
        return None if output is None else self.runner.dispatch(output, self._requests.sampling)

    def _schedule(self) -> SchedulerOutput | None:
        drafts = None
        if self.speculation is not None:
            num_running = -(-self.scheduler.num_running // self.runner.num_stages)  # in the step
            drafts = self.speculation.propose(self._requests.sampling, num_running)
        output = self.scheduler.schedule(drafts)
        if output is None:
            return None
        self.num_preemptions += len(output.preempted)
        for entry in output.scheduled:
            if entry.sequence.first_scheduled_time is None:
                entry.sequence.first_scheduled_time = time.monotonic()
        return output

    def _process(self, step: DispatchedStep) -> list[Request]:
        """Applies the tokens that a step sampled; returns the affected requests."""
        scheduled = step.output.scheduled
        logprobs = step.logprobs()
        for index, prompt_logprobs in step.prompt_logprobs:
            entry = scheduled[index]
            if self._requests.has(entry.sequence):
                self._requests.completion(entry.sequence).add_prompt_logprobs(entry.start, prompt_logprobs)
        accepted = [entry.accepted(tokens) for entry, tokens in zip(scheduled, step.token_ids(), strict=True)]
        valid = [
            list(itertools.takewhile(_is_token, token_ids)) if INVALID_TOKEN_ID in token_ids else token_ids
            for token_ids in accepted
        ]
        first_rows = itertools.accumulate((entry.num_rows for entry in scheduled), initial=0)
        first_row_of = {entry.sequence.seq_id: row for entry, row in zip(scheduled, first_rows, strict=False)}
        touched: dict[str, Request] = {}
        for sequence, token_id, index in self.scheduler.update(step.output, valid):
            request = self._add_token(sequence, token_id, logprobs, first_row_of[sequence.seq_id] + index)
            touched[request.request_id] = request
        if self.speculation is not None:
            self.speculation.observe(step.output, valid)
        for entry, token_ids, valid_ids in zip(scheduled, accepted, valid, strict=True):
            if entry.samples and len(valid_ids) < len(token_ids) and not entry.sequence.status.finished:
                request = self._fail(self._requests.completion(entry.sequence))
                touched[request.request_id] = request
        for request_id, request in touched.items():
            if request.finished:
                self._requests.pop(request_id)
        if self.stored is not None:
            self.stored.take_in(step.output, touched.values(), self.scheduler)
        return list(touched.values())

    def _add_token(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs[np.ndarray] | None, row: int
    ) -> Request:
        """Applies a token that the scheduler has appended, and ends its completion where text or grammar end."""
        completion = self._requests.completion(sequence)
        stop = completion.add_token(token_id, logprobs, row)
        if not sequence.status.finished and (stop is not None or completion.sampling.grammar_is_complete):
            self.scheduler.finish_sequence(sequence.seq_id, SequenceStatus.FINISHED_STOPPED, stop)
        if sequence.status.finished:
            completion.finish(stop)
            self._requests.end(completion)
        return completion.request

    def _fail(self, completion: CompletionState) -> Request:
        """Ends the request of a sequence for which no token could be sampled."""
        request = completion.request
        fault = completion.sampling.fault()
        if fault is None:
            # Its cached keys and values may be what made its logits non-finite.
            self.scheduler.block_manager.forget_prefix(completion.sequence)
        self.abort_request(request.request_id)
        request.error = fault or EngineError(
            "the model's logits are not finite: its weights are damaged, or its activations exceed the dtype's range "
            "(float16 has the smallest; try float32)"
        )
        return request

    def _discard_inflight(self) -> None:
        """Accounts for steps whose sequences have all ended, without waiting for them."""
        while self._inflight:
            output = self._inflight.popleft().output
            for _ in self.scheduler.update(output, [()] * len(output.scheduled)):
                pass

    def _extend_blocks(self, sequence: Sequence, start: int, num_tokens: int) -> bool:
        """See `BlockManager.extend`."""
        return self.scheduler.ranks[0].block_manager.extend(sequence, start, num_tokens)


def _is_token(token_id: int) -> bool:
    return token_id != INVALID_TOKEN_ID
