"""The engine: requests in, tokens out, one step at a time.

A step is schedule -> dispatch -> update. The next step is dispatched before this one's tokens are read, so that the
devices never wait for the host. If a sequence needs its newest token to sample the next one (penalties, structured
output), only the model of the next step runs ahead: its sampler is dispatched once the tokens are read. No step runs
ahead of a step with drafts. With pipeline stages, a step of other sequences is in flight for each stage.
"""

from __future__ import annotations

import time
from collections import abc, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.engine.execution.dispatched_step import DispatchedStep, ForwardedStep
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.sequence_sampling import NOTHING_SUPPRESSED, SuppressedTokens
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.request_grammars import RequestGrammars
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.request_factory import RequestFactory
from jaxis.engine.scheduling.data_ranks import add_all
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxis.engine.speculation import make_speculation
from jaxis.engine.unfinished_requests import UnfinishedRequests
from jaxis.errors import EngineError, RequestError
from jaxis.outputs import RequestOutput
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.engine.execution.token_logprobs import TokenLogprobs
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.layers.module import JaxModule
    from jaxis.tokenizer import Tokenizer

NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or its activations exceed the dtype's range "
    "(float16 has the smallest; try float32)"
)


class LLMEngine:
    """Serves requests with one model.

    Attributes:
      max_model_len: Most tokens of a sequence, prompt and output together.
      eos_token_ids: Tokens that end a sequence.
      scheduler: Scheduler of steps, on each data rank.
      runner: Runner of steps.
      grammar_compiler: Compiler of `structured_outputs`; may be used from other threads.
      connector: Connector to blocks beyond the devices; other threads may use a part of it.
      num_preemptions: Times that a sequence lost its blocks to another, since the start.
      speculation: Maker of drafts.
      holds: Reasons why no step may run, such as "paused"; requests wait until there is none.

    Args:
      vllm_config: The engine's configuration.
      programs: Programs of the model.
      tokenizer: Tokenizer of the checkpoint; None if it has none.
      eos_token_ids: Tokens that end a sequence.
      connector: Connector to blocks beyond the devices; None: there are no such blocks.
      features: Features of requests (see `RequestFeature`).
      suppressed: Tokens that are never generated.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        programs: Programs,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        connector: KVConnector | None = None,
        features: abc.Sequence[RequestFeature] = (),
        suppressed: SuppressedTokens = NOTHING_SUPPRESSED,
    ) -> None:
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.runner = Runner(vllm_config, programs, connector, features)
        self.connector = self.runner.connector
        self.max_model_len = self.runner.max_model_len
        self.grammar_compiler = GrammarCompiler(tokenizer, self.runner.vocab_size, eos_token_ids)
        model_type = vllm_config.model_config.hf_config.get("model_type")
        self._grammars = RequestGrammars(self.grammar_compiler, model_type)
        self.num_preemptions = 0
        self.holds: set[str] = set()
        self.speculation = make_speculation(
            vllm_config.speculative_config,
            self.runner,
            lambda *of: self.scheduler.ranks[0].block_manager.extend(*of),
            tokenizer,
        )
        self._factory = RequestFactory(
            tokenizer,
            eos_token_ids,
            suppressed,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            seed=vllm_config.model_config.seed,
            defaults=vllm_config.model_config.parameter_defaults,
            features=self.runner.features,
        )
        self._reset_state()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """True if there is a step to run."""
        return self.has_unfinished and not self.holds

    @property
    def prefix_cache_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache, since the start."""
        return self.scheduler.block_manager.prefix_cache_queries

    @property
    def prefix_cache_hits(self) -> int:
        """Prompt tokens found in the prefix cache, since the start."""
        return self.scheduler.block_manager.prefix_cache_hits

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        client: str | None = None,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
        **asked: Any,
    ) -> Request:
        """Queues a request for `params.n` completions of a prompt.

        Args:
          request_id: Id, unique among unfinished requests.
          prompt_token_ids: Tokens of the prompt, at least one.
          params: Parameters of sampling and stopping.
          prompt: Text of the prompt, for the output.
          priority: Priority; the lower value is served first.
          client: Client of the request; clients share the tokens of steps equally (see `FairShares`).
          cache_salt: Salt of the prefix cache; only requests with the same salt share blocks.
          grammar: Compiled `params.structured_outputs` and what else ends up in a grammar (see `RequestGrammars`); None
            compiles it here, which may take seconds.
          asked: Arguments of features, by their names; one that is empty asks for nothing.

        Returns:
          The request, which `step` advances.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured; nothing was queued.
        """
        # The last token is never computed: a prompt that fills the context can be scored.
        prompt_token_ids = self._factory.checked_prompt(prompt_token_ids, spare=0 if params.max_tokens == 1 else 1)
        self._factory.check_needs_no_tokenizer(params)
        self.connector.check(params)
        features = self._features_asked(asked)
        for feature in features:
            feature.check(asked[feature.name], len(prompt_token_ids))
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} already exists: wait for it, abort it, or choose another id")
        if grammar is None:
            grammar = self._grammars.make(params, prompt, prompt_token_ids)
        request = self._factory.make(
            request_id,
            prompt_token_ids,
            params,
            prompt=prompt,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
            grammar=grammar,
        )
        sequences = [completion.sequence for completion in request.completions]
        for feature in features:
            for sequence in sequences:
                feature.mark(sequence, asked[feature.name])
        self.speculation.begin(sequences, self.scheduler.num_running)
        add_all(self.scheduler, sequences)
        self._requests.add(request)
        self.connector.request_added(sequences[0])
        return request

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request; returns its output so far, or None if there is no such unfinished request."""
        request = self._requests.pop(request_id)
        if request is None:
            return None
        for completion in request.completions:
            if not completion.sequence.status.finished:
                self.scheduler.abort_sequence(completion.sequence.seq_id)
                completion.finish()
            self.speculation.forget(completion.sequence)
            self._requests.end(completion)
        self.connector.request_done(request.completions[0].sequence, answered=False)
        return request.output()

    def abort_all(self) -> None:
        for request in list(self._requests):
            self.abort_request(request.request_id)

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that got new tokens, including those that ended.

        A request whose logits are not finite, or whose grammar no token can continue, ends with its `error` set.

        Raises:
          EngineError: The step failed. Every unfinished request is lost, with its `error` set; the engine accepts new
            requests.
        """
        return self._take(self._step)

    def settle(self) -> list[Request]:
        """Reads the tokens of the steps in flight and dispatches no further step. Returns and raises as `step` does."""
        return self._take(self._settle)

    def set_models(self, models: abc.Sequence[JaxModule], weights: bytes) -> None:
        """Replaces the weights. Unfinished requests go on with the new ones, and their known tokens are computed again.

        No step may be in flight: call `settle` first.

        Args:
          models: Models of this host's pipeline stages.
          weights: Unique digest of the weights; blocks of other weights are no longer found.

        Raises:
          ConfigError: The weights have other shapes or types; nothing has changed.
        """
        self.runner.set_models(models, weights)
        self.scheduler.recompute_all()
        self.scheduler.block_manager.set_weights(weights)
        self.connector.step_done()

    def _take(self, run: abc.Callable[[], list[Request]]) -> list[Request]:
        try:
            requests = run()
            self.connector.step_done()
            return requests
        except BaseException as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            message = f"a step failed and {len(self._requests)} requests were lost: {message}"
            self.reset(message)
            if isinstance(error, Exception):
                raise EngineError(message) from error
            raise

    def reset(self, reason: str = "the engine was reset") -> None:
        """Drops the prefix cache and all requests, and sets their `error` to the reason."""
        self._start_over(reason)
        self.runner.recover()

    def check_alone(self, token_ids: abc.Sequence[int]) -> list[int]:
        """Checks tokens that run without any request beside them. Forgets steps in flight, whose requests have ended.

        Raises:
          RequestError: No tokens, an unknown one, or too many for the cache.
          EngineError: Requests are running.
        """
        if self.has_unfinished:
            raise EngineError("logits require an idle engine: finish or abort the running requests first")
        self._discard_inflight()
        return self._factory.checked_prompt(token_ids, spare=0)

    def _features_asked(self, asked: abc.Mapping[str, Any]) -> list[RequestFeature]:
        """Returns the features that a request's arguments ask for; raises a RequestError for one that is not here."""
        found: list[RequestFeature] = []
        for name, value in asked.items():
            if value:
                if (feature := self.runner.feature(name)) is None:
                    raise RequestError(f"the request has {name!r}, which this engine was started without")
                found.append(feature)
        return found

    def close(self) -> None:
        """Frees the device memory; the engine cannot be used afterwards."""
        self.connector.close()
        self._start_over("the engine was closed")
        self.runner.close()

    def _start_over(self, reason: str) -> None:
        for request in self._requests:
            request.error = EngineError(reason)
            self.connector.request_done(request.completions[0].sequence, answered=False)
        self._reset_state()

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache for requests that are added from now on; running ones go on."""
        self.scheduler.block_manager.reset_prefix_cache()
        self.connector.step_done()

    def _reset_state(self) -> None:
        self.scheduler = self.runner.make_scheduler()
        self.connector.begin(self.scheduler)
        self._requests = UnfinishedRequests(self.runner.features)
        self._inflight: deque[DispatchedStep] = deque()
        self._last_step_ended = 0.0
        self.speculation.reset()

    def _step(self) -> list[Request]:
        # A step that was dispatched ahead began when the tokens of the previous one were read.
        started = self._last_step_ended if self._inflight else time.monotonic()
        # If all stages are busy, one more step gains nothing, and its sequences would be missing in the others.
        num_ahead = 1 if self.scheduler.takes_tokens_in_flight else 0
        forwarded = self._run_ahead(self.runner.num_stages + num_ahead)
        if not self._inflight:
            return []
        current = self._inflight.popleft()
        requests = self._process(current)
        if forwarded is not None:
            self._inflight.append(forwarded.sample(self._requests.sampling))
        self._note_time(current, started)
        if not self.scheduler.has_unfinished:
            self._discard_inflight()
        elif self._inflight:
            self._run_ahead(self.runner.num_stages)  # before the caller looks at the outputs
        return requests

    def _settle(self) -> list[Request]:
        touched: dict[str, Request] = {}
        while self._inflight:
            touched |= {request.request_id: request for request in self._process(self._inflight.popleft())}
        return list(touched.values())

    def _run_ahead(self, num_steps: int) -> ForwardedStep | None:
        """Dispatches steps until `num_steps` are in flight, or the next one depends on tokens that are not known yet.

        Returns:
          A step whose model was dispatched, and whose sampler waits for tokens in flight; None if there is none.
        """
        while len(self._inflight) < num_steps:
            if self._inflight and self.scheduler.takes_tokens_in_flight:
                newest = self._inflight[-1].output
                if newest.has_drafts or self.speculation.wants_newest_tokens(newest, self.scheduler.num_running):
                    return None
                if any(self._requests.needs_newest_token(entry.sequence) for entry in newest.scheduled):
                    output = self._schedule()
                    return None if output is None else self.runner.forward(output)
            output = self._schedule()
            if output is None:
                return None
            self._inflight.append(self.runner.dispatch(output, self._requests.sampling))
        return None

    def _note_time(self, step: DispatchedStep, started: float) -> None:
        """Records the end of a step, and its time unless it waited for a program to compile."""
        self._last_step_ended = time.monotonic()
        wait = self.runner.last_compile_wait
        if wait is None or wait.started < started:
            self.speculation.observe_time(step.output, self._last_step_ended - started)

    def _schedule(self) -> SchedulerOutput | None:
        num_running = -(-self.scheduler.num_running // self.runner.num_stages)  # sequences of one stage's step
        drafts = self.speculation.propose(self._requests.sampling, num_running)
        output = self.scheduler.schedule(drafts)
        awaited, waits = self.scheduler.awaited_spans, output is None and not self._inflight
        for feature in self.runner.features:
            feature.prepare(awaited, waits=waits)
        if output is None:
            return None
        self.num_preemptions += len(output.preempted)
        return output

    def _process(self, step: DispatchedStep) -> list[Request]:
        """Applies the tokens that a step sampled; returns the affected requests."""
        logprobs = step.logprobs()
        self._note_read_tokens(step)
        new_token_ids, failed = step.new_token_ids()
        first_rows = step.first_rows()
        touched: dict[str, Request] = {}
        for sequence, token_id, index in self.scheduler.update(step.output, new_token_ids):
            request = self._add_token(sequence, token_id, logprobs, first_rows[sequence.seq_id] + index)
            touched[request.request_id] = request
        self.speculation.observe(step.output, new_token_ids)
        for sequence in failed:
            if not sequence.status.finished:
                request = self._fail(self._requests.completion(sequence))
                touched[request.request_id] = request
        self.connector.step_read(step.output)
        for request_id, request in touched.items():
            if request.finished:
                self._requests.pop(request_id)
                first, answered = request.completions[0].sequence, request.error is None
                request.kv_transfer_params = self.connector.request_done(first, answered=answered)
        return list(touched.values())

    def _note_read_tokens(self, step: DispatchedStep) -> None:
        """Applies a step's results about the tokens that it read: log-probabilities, and what features observe."""
        for index, prompt_logprobs in step.prompt_logprobs:
            entry = step.output.scheduled[index]
            if self._requests.has(entry.sequence):
                self._requests.completion(entry.sequence).add_prompt_logprobs(entry.start, prompt_logprobs)
        for observation in step.observed:
            for entry, seen in observation.of_entries():
                if self._requests.has(entry.sequence):
                    observation.feature.take(self._requests.completion(entry.sequence), entry.start, seen)

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
        if (error := completion.sampling.fault()) is None:
            # Its cached keys and values may be the cause of the non-finite logits.
            self.scheduler.block_manager.forget_prefix(completion.sequence)
        self.abort_request(request.request_id)
        request.error = error or EngineError(NOT_FINITE)
        return request

    def _discard_inflight(self) -> None:
        """Removes steps in flight whose sequences have all ended, without waiting for them."""
        while self._inflight:
            output = self._inflight.popleft().output
            for _ in self.scheduler.update(output, [()] * len(output.scheduled)):
                pass
