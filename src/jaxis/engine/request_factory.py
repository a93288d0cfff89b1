"""Checks the arguments of requests and builds the requests of an engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING

from jaxis.engine.execution.sampling_batch import check_scores
from jaxis.engine.execution.sequence_sampling import SequenceSampling, draw_seed, sequence_seed, tokenize_bad_words
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.routed_experts import RoutedLayers
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.errors import ConfigError, RequestError
from jaxis.prompts import EmbeddedInput, checked_token_ids
from jaxis.sampling_params import RAW_LOGPROBS, LogprobsMode, SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.tokenizer import Tokenizer

# Characters of a prediction that are read, for each token of the longest sequence.
MAX_PREDICTION_CHARACTERS = 8


class RequestFactory:
    """Maker of an engine's requests.

    Args:
      tokenizer: The checkpoint's tokenizer, if it has one.
      eos_token_ids: Tokens that end a sequence.
      vocab_size: V.
      max_model_len: Maximum number of tokens in a sequence, prompt and output together.
      seed: Seed for requests that bring none.
      logprobs_mode: Mode for requests that bring none.
      returns_experts: True if requests that do not say return the experts of their tokens.
      routed_layers: Layers of the model with experts.

    Raises:
      ConfigError: `returns_experts` is true for a model without experts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        logprobs_mode: LogprobsMode,
        returns_experts: bool,
        routed_layers: RoutedLayers,
    ) -> None:
        if returns_experts and routed_layers.dtype is None:
            raise ConfigError(f"enable_return_routed_experts has no use, because {routed_layers.why_not}: leave it out")
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._seed, self._logprobs_mode = seed, logprobs_mode
        self._returns_experts, self._routed_layers = returns_experts, routed_layers
        self._num_requests = 0

    def make(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None,
        priority: int,
        client: str | None,
        cache_salt: str | None,
        adapter: bytes,
        inputs: tuple[EmbeddedInput, ...],
        grammar: Grammar | None,
        reads_prediction: bool,
    ) -> Request:
        """Returns a request for `params.n` completions.

        The arguments are those of `LLMEngine.add_request`, checked; a prediction is read only where it is of use.
        """
        if params.logprobs_mode is None and self._logprobs_mode != RAW_LOGPROBS:
            params = dataclasses.replace(params, logprobs_mode=self._logprobs_mode)
        if params.return_routed_experts is None and self._returns_experts:
            params = dataclasses.replace(params, return_routed_experts=True)
        self._routed_layers.check(params, len(prompt_token_ids))
        check_scores(params)
        self._num_requests += 1
        seed = draw_seed(self._seed, self._num_requests) if params.seed is None else params.seed
        request = Request(request_id, prompt, prompt_token_ids, params, seed)
        prediction = self._prediction(params) if reads_prediction else []
        for index in range(params.n):
            completion = self._completion(request, index, priority, client, cache_salt, adapter, grammar, prediction)
            completion.sequence.inputs = inputs
            request.completions.append(completion)
        return request

    def checked_prompt(self, token_ids: AbstractSequence[int], *, spare: int = 1) -> list[int]:
        """Checks the token ids, and returns them as a list.

        Raises:
          RequestError: There are none, an unknown one, or too many for `spare` more.
        """
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) + spare > self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and max_model_len={self._max_model_len} must hold it and at "
                "least one more: shorten it, or start with a larger max_model_len"
            )
        return checked_token_ids(token_ids, self._vocab_size)

    def check_needs_no_tokenizer(self, params: SamplingParams) -> None:
        """Raises a RequestError for parameters that are texts if there is no tokenizer."""
        if self._tokenizer is not None:
            return
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts:
                raise RequestError("needs a tokenizer, and the checkpoint has none: use token ids instead", param=name)

    def _completion(
        self,
        request: Request,
        index: int,
        priority: int,
        client: str | None,
        cache_salt: str | None,
        adapter: bytes,
        grammar: Grammar | None,
        prediction_token_ids: list[int],
    ) -> CompletionState:
        params, prompt_token_ids = request.params, request.prompt_token_ids
        max_tokens = self._max_model_len if params.max_tokens is None else params.max_tokens
        sequence = Sequence(
            SequenceId(request.request_id, index),
            prompt_token_ids,
            params,
            self._eos_token_ids,
            max(len(prompt_token_ids) + 1, min(self._max_model_len, len(prompt_token_ids) + max_tokens)),
            arrival=self._num_requests,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
            adapter=adapter,
            prediction_token_ids=prediction_token_ids,
        )
        sampling = SequenceSampling(
            params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            vocab_size=self._vocab_size,
            seed=sequence_seed(request.seed, index),
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            bad_words_token_ids=self._bad_words(params),
            grammar=None if grammar is None else grammar.new_matcher(params.stop_token_ids),
        )
        return CompletionState(request, sequence, sampling, self._tokenizer, self._routed_layers.dtype)

    def _bad_words(self, params: SamplingParams) -> AbstractSequence[AbstractSequence[int]]:
        if not params.bad_words or self._tokenizer is None:
            return ()
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        return tokenize_bad_words(params.bad_words, encode, self._vocab_size)

    def _prediction(self, params: SamplingParams) -> list[int]:
        if params.prediction is None:
            return []
        if isinstance(params.prediction, str):
            # No output is longer than the context, and no string that is read takes long to tokenize.
            text = params.prediction[: MAX_PREDICTION_CHARACTERS * self._max_model_len]
            token_ids = [] if self._tokenizer is None else self._tokenizer.encode(text, add_special_tokens=False)
        else:
            token_ids = params.prediction
        return [token_id for token_id in token_ids if token_id < self._vocab_size][: self._max_model_len]
