"""The engine: requests in, tokens out, one step at a time.

A step is schedule -> dispatch -> update: `StepsInFlight` schedules and dispatches, ahead of the step whose tokens
`UnfinishedRequests` gives to the requests.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any

from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.sequence_sampling import NOTHING_SUPPRESSED, SuppressedTokens
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.request_grammars import RequestGrammars
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.output_processor import Request
from jaxis.engine.request_factory import RequestFactory
from jaxis.engine.speculation import NoSpeculation, make_speculation
from jaxis.engine.steps_in_flight import StepsInFlight
from jaxis.engine.unfinished_requests import UnfinishedRequests
from jaxis.errors import EngineError, RequestError
from jaxis.outputs import RequestOutput
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.tokenizer import Tokenizer

PAUSED = "paused"
"""Member of an engine's `holds` while the user pauses it."""


class LLMEngine:
    """Serves requests with one model.

    Attributes:
      max_model_len: Most tokens of a sequence, prompt and output together.
      eos_token_ids: Tokens that end a sequence.
      scheduler: Scheduler of steps, on each data rank.
      runner: Runner of steps.
      grammar_compiler: Compiler of `structured_outputs`; may be used from other threads.
      connector: Connector to blocks beyond the devices; other threads may use a part of it.
      factory: Maker of requests.
      steps: Steps that were dispatched and not read.
      holds: Reasons why no step may run, such as PAUSED; requests wait until there is none.

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
        self.holds: set[str] = set()
        speculation = make_speculation(
            vllm_config.speculative_config,
            self.runner,
            lambda *of: self.scheduler.ranks[0].block_manager.extend(*of),
            tokenizer,
        )
        self.factory = RequestFactory(
            tokenizer,
            eos_token_ids,
            suppressed,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            seed=vllm_config.model_config.seed,
            defaults=vllm_config.model_config.parameter_defaults,
            features=self.runner.features,
        )
        self.steps = StepsInFlight(self.runner, speculation)
        self._start_over()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """True if there is a step to run."""
        return self.has_unfinished and not self.holds

    @property
    def speculation(self) -> NoSpeculation:
        """Maker of drafts, which may be replaced while no request is unfinished."""
        return self.steps.speculation

    @speculation.setter
    def speculation(self, speculation: NoSpeculation) -> None:
        self.steps.speculation = self._requests.speculation = speculation

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence lost its blocks to another, since the start."""
        return self.steps.num_preemptions

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
        prompt_token_ids = self.factory.checked_prompt(prompt_token_ids, spare=0 if params.max_tokens == 1 else 1)
        self.factory.check_needs_no_tokenizer(params)
        self.connector.check(params)
        features = self.runner.features.asked(asked, len(prompt_token_ids))
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} already exists: wait for it, abort it, or choose another id")
        if grammar is None:
            grammar = self._grammars.make(params, prompt, prompt_token_ids)
        request = self.factory.make(
            request_id,
            prompt_token_ids,
            params,
            prompt=prompt,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
            grammar=grammar,
        )
        for feature in features:
            for completion in request.completions:
                feature.mark(completion.sequence, asked[feature.name])
        self._requests.add(request)
        return request

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request; returns its output so far, or None if there is no such unfinished request."""
        request = self._requests.abort(request_id)
        return None if request is None else request.output()

    def abort_all(self) -> None:
        for request in list(self._requests):
            self._requests.abort(request.request_id)

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that got new tokens, including those that ended.

        A request whose logits are not finite, or whose grammar no token can continue, ends with its `error` set.

        Raises:
          EngineError: The step failed. Every unfinished request is lost, with its `error` set; the engine accepts new
            requests.
        """
        return self._or_reset(self._step)

    def settle(self) -> list[Request]:
        """Reads the tokens of the steps in flight and dispatches no further step. Returns and raises as `step` does."""
        return self._or_reset(self._settle)

    def _step(self) -> list[Request]:
        step = self.steps.next()
        if step is None:
            return []
        requests = self._requests.apply(step)
        self.steps.go_on(step)
        return requests

    def _settle(self) -> list[Request]:
        touched: dict[str, Request] = {}
        while (step := self.steps.oldest()) is not None:
            touched |= {request.request_id: request for request in self._requests.apply(step)}
        return list(touched.values())

    def _or_reset(self, run: abc.Callable[[], list[Request]]) -> list[Request]:
        """Runs a step, after whose failure the engine starts over."""
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
        self._requests.lose_all(reason)
        self._start_over()
        self.runner.recover()

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache for requests that are added from now on; running ones go on."""
        self.scheduler.block_manager.reset_prefix_cache()
        self.connector.step_done()

    def close(self) -> None:
        """Frees the device memory; the engine cannot be used afterwards."""
        self.connector.close()
        self._requests.lose_all("the engine was closed")
        self._start_over()
        self.runner.close()

    def _start_over(self) -> None:
        self.scheduler = self.runner.make_scheduler()
        self.connector.begin(self.scheduler)
        self._requests = UnfinishedRequests(self.scheduler, self.runner.features, self.speculation, self.connector)
        self.steps.start_over(self.scheduler, self._requests)
