"""The engine: requests in, tokens out, one step at a time.

A step is schedule -> dispatch -> update. The next step is dispatched before this one's tokens are read, so that the
devices need not wait for the host. Where a request needs its own newest token to sample the next (penalties, structured
output), that holds for the model only: the sampler is dispatched once the tokens are read.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxis.engine.execution.programs import CompileWait
from jaxis.engine.execution.request_sampling import RequestSampling, request_seed, tokenize_bad_words
from jaxis.engine.execution.runner import DispatchedStep, Runner
from jaxis.engine.execution.sampler import INVALID_TOKEN_ID
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.output_processor import RequestState, SequenceState
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from jaxis.engine.scheduling.sequence import Request, RequestStatus
from jaxis.errors import EngineError, RequestError
from jaxis.outputs import RequestOutput
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.engine.grammar.delayed_grammar import Grammar
    from jaxis.layers.module import JaxModule
    from jaxis.tokenizer import Tokenizer


class LLMEngine:
    """Serves requests with one model.

    Attributes:
      max_model_len: Most tokens of a request, prompt and output together.
      eos_token_ids: Tokens that end a sequence.
      scheduler: Decides what runs.
      runner: Runs it.
      grammar_compiler: Compiles `structured_outputs`; may be used from other threads.
      num_preemptions: Times that a request lost its blocks to another, since the start.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: JaxModule,
        mesh: jax.sharding.Mesh,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        on_compile: Callable[[Any], Any],
    ) -> None:
        """Allocates the KV cache; see `Runner` for the arguments and errors."""
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.runner = Runner(vllm_config, model, mesh, on_compile=on_compile)
        self.max_model_len = self.runner.max_model_len
        self.grammar_compiler = GrammarCompiler(tokenizer, self.runner.vocab_size, eos_token_ids)
        self.num_preemptions = 0
        self._num_requests = 0
        self._requests: dict[str, RequestState] = {}
        self._start_over("")

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def last_compile_wait(self) -> CompileWait | None:
        """When a step last waited for a program to compile, if one did. Other threads may ask."""
        return self.runner.last_compile_wait

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> RequestState:
        """Queues a request; `params.n` sequences share its prompt.

        Args:
          request_id: Unique among unfinished requests.
          prompt_token_ids: At least one.
          params: How to sample and when to stop.
          prompt: The prompt's text, to be returned.
          priority: The lower value is served first.
          cache_salt: Only requests with the same salt share prefix-cache blocks.
          grammar: `params.structured_outputs`, compiled; without it that happens here, which may take seconds.

        Returns:
          The request, which steps carry on.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured; nothing was queued.
        """
        prompt_token_ids = self._checked_prompt(prompt_token_ids)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer, and the checkpoint has none: use token ids instead")
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} exists already: wait for it, abort it, or choose another id")
        if params.structured_outputs is None:
            grammar = None
        elif grammar is None:
            grammar = self.grammar_compiler.compile(params.structured_outputs)
        state = RequestState(request_id, prompt, prompt_token_ids, params)
        self._num_requests += 1
        for index in range(params.n):
            sequence_id = request_id if params.n == 1 else f"{request_id}/{index}"
            state.sequences.append(self._new_sequence(state, sequence_id, index, priority, cache_salt, grammar))
        added = []
        try:
            for sequence in state.sequences:
                self.scheduler.add_request(sequence.request)
                added.append(sequence)
        except RequestError:
            for sequence in added:
                self.scheduler.abort_request(sequence.request.request_id)
            raise
        for sequence in state.sequences:
            self._sequences[sequence.request.request_id] = sequence
            self._sampling[sequence.request.request_id] = sequence.sampling
        self._requests[request_id] = state
        return state

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request; returns what it has so far, or None if it is not unfinished."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        for sequence in state.sequences:
            if not sequence.request.status.finished:
                self.scheduler.abort_request(sequence.request.request_id)
                sequence.finish()
            self._forget(sequence)
        return state.output()

    def step(self) -> list[RequestState]:
        """Runs one step; returns the requests that got new tokens, those that it ended among them.

        A request whose logits are not finite, or whose form cannot be continued, ends with its `error` set.

        Raises:
          EngineError: The step failed. Every unfinished request is lost, with its `error` set; the engine takes new
            ones.
        """
        try:
            return self._step()
        except BaseException as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            message = f"a step failed and {len(self._requests)} requests were lost: {message}"
            self.reset(message)
            if isinstance(error, Exception):
                raise EngineError(message) from error
            raise

    def reset(self, reason: str = "the engine was reset") -> None:
        """Drops the prefix cache and every request; those get an `error` with the reason."""
        self._start_over(reason)
        self.runner.recover()

    def compute_logits(self, token_ids: Sequence[int], *, paged: bool) -> np.ndarray:
        """Logits float32 [T, V] of every position of one sequence.

        Args:
          token_ids: T tokens.
          paged: Through the KV cache, in chunks, as a prompt is served; else as one whole sequence without a cache.

        Raises:
          RequestError: No tokens, an unknown one, or too many for the cache.
          EngineError: Requests are running.
        """
        if self.has_unfinished:
            raise EngineError("compute_logits needs the engine idle: finish or abort the running requests first")
        token_ids = self._checked_prompt(token_ids, spare=0)
        if not paged:
            return self.runner.whole_logits(token_ids)
        try:
            return self._paged_logits(token_ids)
        except BaseException:
            self.reset()  # the step may have taken the caches with it
            raise

    def _paged_logits(self, token_ids: list[int]) -> np.ndarray:
        self._discard_inflight()
        request = Request("", token_ids, SamplingParams(), frozenset(), len(token_ids), arrival=0)
        blocks = self.scheduler.block_manager
        logits = []
        chunk = self.vllm_config.scheduler_config.max_num_batched_tokens
        for start in range(0, len(token_ids), chunk):
            request.num_computed_tokens = start
            entry = ScheduledRequest(request, start, min(chunk, len(token_ids) - start), samples=False)
            blocks.allocate(request, start + entry.num_tokens)
            logits.append(self.runner.paged_logits(SchedulerOutput((entry,), 0, ())))
        blocks.free(request)
        return np.concatenate(logits)

    def close(self) -> None:
        """Gives the device memory back; the engine cannot be used any more."""
        self._start_over("the engine was closed")
        self.runner.close()

    def _start_over(self, reason: str) -> None:
        for state in self._requests.values():
            state.error = EngineError(reason)
        cache, limits = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        self.scheduler = Scheduler(
            BlockManager(self.runner.num_blocks, cache.block_size, cache.enable_prefix_caching),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        self._requests = {}
        self._sequences: dict[str, SequenceState] = {}
        self._sampling: dict[str, RequestSampling] = {}
        self._inflight: DispatchedStep | None = None

    def _step(self) -> list[RequestState]:
        current = self._inflight or self._dispatch()
        self._inflight = None
        if current is None:
            return []
        if any(self._needs_newest_token(entry.request) for entry in current.output.scheduled):
            output = self._schedule()
            step = None if output is None else self.runner.forward(output)
            outputs = self._process(current)
            if step is not None:
                self._inflight = self.runner.sample(step, self._sampling)
        else:
            self._inflight = self._dispatch()
            outputs = self._process(current)
        if not self.scheduler.has_unfinished:
            self._discard_inflight()
        return outputs

    def _dispatch(self) -> DispatchedStep | None:
        output = self._schedule()
        return None if output is None else self.runner.dispatch(output, self._sampling)

    def _schedule(self) -> SchedulerOutput | None:
        output = self.scheduler.schedule()
        if output is None:
            return None
        self.num_preemptions += len(output.preempted)
        for entry in output.scheduled:
            if entry.request.first_scheduled_time is None:
                entry.request.first_scheduled_time = time.monotonic()
        return output

    def _needs_newest_token(self, request: Request) -> bool:
        sequence = self._sequences.get(request.request_id)
        return sequence is not None and sequence.sampling.needs_newest_token

    def _process(self, step: DispatchedStep) -> list[RequestState]:
        token_ids = step.token_ids()
        logprobs = step.logprobs()
        for index, prompt_logprobs in step.prompt_logprobs:
            entry = step.output.scheduled[index]
            sequence = self._sequences.get(entry.request.request_id)
            if sequence is not None and sequence.request is entry.request:
                sequence.add_prompt_logprobs(entry.start, prompt_logprobs)
        touched: dict[str, RequestState] = {}
        row_of: dict[str, int] = {}
        for row, (entry, token_id) in enumerate(zip(step.output.scheduled, token_ids, strict=True)):
            request_id = entry.request.request_id
            row_of[request_id] = row
            if entry.samples and token_id == INVALID_TOKEN_ID and not entry.request.status.finished:
                state = self._fail(self._sequences[request_id])
                touched[state.request_id] = state
        for request, token_id in self.scheduler.update(step.output, token_ids):
            sequence = self._sequences[request.request_id]
            stop = sequence.add_token(token_id, logprobs, row_of[request.request_id])
            if not request.status.finished and (stop is not None or sequence.sampling.grammar_is_complete):
                self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_STOPPED, stop)
            if request.status.finished:
                sequence.finish(stop)
                self._forget(sequence)
            touched[sequence.parent.request_id] = sequence.parent
        for request_id, state in touched.items():
            if state.finished:
                self._requests.pop(request_id, None)
        return list(touched.values())

    def _fail(self, sequence: SequenceState) -> RequestState:
        """Ends the request of a sequence that has no token to choose from."""
        state = sequence.parent
        fault = sequence.sampling.fault()
        if fault is None:
            # What made its logits so may stand in its keys and values.
            self.scheduler.block_manager.forget_prefix(sequence.request)
        self.abort_request(state.request_id)
        state.error = fault or EngineError(
            "the model's logits are not finite: its weights are damaged, or its numbers exceed the dtype's range "
            "(float16 has the smallest; try float32)"
        )
        return state

    def _discard_inflight(self) -> None:
        """Accounts for a step whose requests have all ended, without waiting for it."""
        if self._inflight is not None:
            output = self._inflight.output
            self.scheduler.update(output, [0] * len(output.scheduled))
            self._inflight = None

    def _forget(self, sequence: SequenceState) -> None:
        self._sequences.pop(sequence.request.request_id, None)
        self._sampling.pop(sequence.request.request_id, None)

    def _new_sequence(
        self,
        state: RequestState,
        sequence_id: str,
        index: int,
        priority: int,
        cache_salt: str | None,
        grammar: Grammar | None,
    ) -> SequenceState:
        params, prompt_token_ids = state.params, state.prompt_token_ids
        max_tokens = self.max_model_len if params.max_tokens is None else params.max_tokens
        request = Request(
            sequence_id,
            prompt_token_ids,
            params,
            self.eos_token_ids,
            min(self.max_model_len, len(prompt_token_ids) + max_tokens),
            arrival=self._num_requests,
            priority=priority,
            cache_salt=cache_salt,
        )
        seed = self.vllm_config.model_config.seed
        sampling = RequestSampling(
            params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=request.output_token_ids,
            vocab_size=self.runner.vocab_size,
            seed=request_seed(params, engine_seed=seed, request_number=self._num_requests, completion_index=index),
            eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
            bad_words_token_ids=self._bad_words(params),
            grammar=None if grammar is None else grammar.new_matcher(params.stop_token_ids),
        )
        return SequenceState(state, request, sampling, index, self.tokenizer)

    def _bad_words(self, params: SamplingParams) -> Sequence[Sequence[int]]:
        if not params.bad_words:
            return ()
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
        return tokenize_bad_words(params.bad_words, encode, self.runner.vocab_size)

    def _checked_prompt(self, token_ids: Sequence[int], *, spare: int = 1) -> list[int]:
        """The token ids as a list, with room for `spare` more."""
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) + spare > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and max_model_len={self.max_model_len} must hold it and at "
                "least one more: shorten it, or start with a larger max_model_len"
            )
        vocab_size = self.runner.vocab_size
        checked = []
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise RequestError(f"the prompt holds {token_id!r}; token ids are integers")
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"the prompt holds token {token_id}; the model's token ids are 0 to {vocab_size - 1}"
                )
            checked.append(int(token_id))
        return checked
